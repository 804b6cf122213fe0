// Every visible text whose contrast with what is behind it is below 4.5, and how many were looked at.
const rgb = text => (text.match(/[\d.]+/g) || []).map(Number);
const over = (top, below) => {
  const a = top.length > 3 ? top[3] : 1;
  return below.map((c, i) => a * top[i] + (1 - a) * c);
};
const linear = v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
const light = c => [0.2126, 0.7152, 0.0722].reduce((sum, w, i) => sum + w * linear(c[i] / 255), 0);
const behind = node => {
  const layers = [];
  for (let e = node; e; e = e.parentElement) layers.unshift(rgb(getComputedStyle(e).backgroundColor));
  return layers.reduce((below, top) => over(top, below), [255, 255, 255]);
};
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
const poor = [];
let seen = 0;
while (walker.nextNode()) {
  const text = walker.currentNode.data.trim(), node = walker.currentNode.parentElement;
  const style = getComputedStyle(node), svg = node.closest("svg");
  if (!text || !node.getClientRects().length || node.matches("title, script, noscript *")) continue;
  if (style.visibility === "hidden" || parseFloat(style.fontSize) === 0) continue;
  let back = behind(svg ? svg.parentElement : node);
  const cell = svg && node.previousElementSibling;
  if (cell && cell.tagName === "rect") {  // a number in a heat map
    const fill = rgb(getComputedStyle(cell).fill).slice(0, 3);
    back = over([...fill, Number(cell.getAttribute("opacity"))], back);
  }
  const front = over(rgb(svg ? style.fill : style.color), back);
  const [a, b] = [light(front), light(back)].sort((x, y) => y - x);
  seen += 1;
  if ((a + 0.05) / (b + 0.05) < 4.5) poor.push([text.slice(0, 40), (a + 0.05) / (b + 0.05)]);
}
return [seen, poor];
