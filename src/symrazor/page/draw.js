"use strict";
// Primitives: elements, numbers, charts. Text is only ever set as text, never parsed as markup.

const SVG = "http://www.w3.org/2000/svg";
const NBSP = "\u00a0", MINUS = "\u2212";

function make(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : String(child));
  }
  return node;
}
const h = (tag, attributes, ...children) => make(document.createElement(tag), attributes, children);
const s = (tag, attributes, ...children) => make(document.createElementNS(SVG, tag), attributes, children);
const captioned = text => h("caption", {}, h("span", {}, text));
const known = value => typeof value === "number" && Number.isFinite(value);

function number(value, digits = 3) {
  if (!known(value)) return "";
  const size = Math.abs(value);
  let text;
  if (size === 0) return "0";
  if (size >= 1e7 || size < 1e-4) text = value.toExponential(1).replace(/e\+?(.*)/, (_, power) => NBSP + "×" + NBSP + "10" + raised(power));
  else if (size >= 100 || Number.isInteger(value)) text = Math.round(value).toLocaleString("en-US");
  else text = String(Number(value.toPrecision(digits)));
  return text.replaceAll("-", MINUS);
}
const amount = value => value > 0 && value < 0.05 ? "<" + NBSP + "0.1" : number(value);
const raised = power => power.replace(/./g, c => c === "-" ? "\u207b" : "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079"[c]);
const signed = value => (value > 0 ? "+" : "") + number(value);
function percent(value) {
  if (!known(value)) return "";
  if (value > 0 && value < 1e-4) return "<" + NBSP + "0.01" + NBSP + "%";
  const hundred = 100 * value;
  return (hundred >= 9.95 ? hundred.toFixed(0) : String(Number(hundred.toPrecision(2)))) + NBSP + "%";
}

function ticks(low, high, count) {
  const raw = (high - low) / Math.max(1, count), power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].find(m => m * power >= raw * 0.999) * power;
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k += 1) found.push(k * step);
  return found.length < 2 && count < 9 ? ticks(low, high, count + 1) : found;
}
function logTicks(low, high) {
  const found = [];
  for (let k = Math.floor(Math.log10(low)); k <= Math.ceil(Math.log10(high)); k += 1) found.push(10 ** k);
  const inside = found.filter(v => v >= low * 0.999 && v <= high * 1.001);
  if (inside.length > 1) return inside.filter((_, i) => inside.length < 6 || i % 2 === 0);
  return [low, high];
}

// A figure that is drawn again whenever its width changes.
function figure(caption, draw) {
  const box = h("div", {});
  let width = 0;
  new ResizeObserver(() => {
    const now = Math.floor(box.clientWidth);
    if (now && now !== width) { width = now; draw(box, now); }
  }).observe(box);
  return h("figure", {}, box, caption && h("figcaption", {}, caption));
}

// Lines over training. series: [{name, x, y, tone, dash}]; options: label, log, height, band, small.
function lineChart(series, options) {
  const clean = series.map(one => {
    const points = one.x.map((x, i) => [x, one.y[i]]).filter(([x, y]) => known(x) && known(y) && (!options.log || y > 0));
    return { ...one, points };
  }).filter(one => one.points.length);
  if (!clean.length) return null;
  const readout = options.small ? null : h("p", { class: "readout", "aria-hidden": "true" });
  const result = figure(options.caption, (box, width) => {
    const old = box.querySelector("svg"), active = old && old === document.activeElement;
    const legend = !options.small && width < 560 && clean.length > 1 && keys(clean.map(one => [one.name, one.tone]));
    box.replaceChildren(...[legend, drawLines(clean, options, width, readout), readout].filter(Boolean));
    if (active) box.querySelector("svg").focus();
  });
  if (options.small) result.prepend(h("h4", {}, options.title));
  return result;
}
const keys = pairs => h("ul", { class: "keys" }, pairs.map(([name, tone]) => h("li", {}, h("i", { class: "b" + tone }), name)));

function drawLines(series, options, width, readout) {
  const height = options.small ? 108 : Math.max(200, Math.min(300, width * 0.42));
  const labelled = !options.small && width >= 560;
  const left = 52, right = labelled ? 12 + 7.2 * Math.max(...series.map(one => Math.min(one.name.length, 24))) : 8, top = 10, bottom = options.small ? 20 : 34;
  const all = series.flatMap(one => one.points);
  const xs = all.map(p => p[0]), ys = all.map(p => p[1]);
  const [x0, x1] = [Math.min(...xs), Math.max(...xs)];
  let [y0, y1] = options.range || [Math.min(...ys), Math.max(...ys)];
  if (options.zero) y0 = Math.min(0, y0);
  const f = options.log ? Math.log : v => v;
  if (y0 === y1) { if (options.log) { y0 /= 2; y1 *= 2; } else { y0 -= Math.abs(y0) * 0.1 || 1; y1 += Math.abs(y1) * 0.1 || 1; } }
  const X = v => left + (width - left - right) * (x1 > x0 ? (v - x0) / (x1 - x0) : 0.5);
  const Y = v => top + (height - top - bottom) * (f(y1) - f(v)) / (f(y1) - f(y0));
  const marks = options.log ? logTicks(y0, y1) : ticks(y0, y1, options.small ? 2 : 4);
  const grid = marks.map(v => [s("line", { class: "axis", x1: left, x2: width - right, y1: Y(v), y2: Y(v) }), s("text", { x: left - 8, y: Y(v) + 4, "text-anchor": "end" }, number(v, 2))]);
  const epochs = options.small ? [x0, x1] : ticks(x0, x1, Math.max(2, Math.floor(width / 90))).filter(Number.isInteger);
  const axis = epochs.map(v => s("text", { x: X(v), y: height - bottom + 16, "text-anchor": v === x0 ? "start" : v === x1 ? "end" : "middle" }, v));
  const path = points => "M" + points.map(([x, y]) => X(x).toFixed(1) + " " + Y(y).toFixed(1)).join("L");
  const lines = series.map(one => one.points.length > 1
    ? s("path", { class: `line s${one.tone} ${one.dash ? "dash" + one.dash : ""}`, d: path(one.points) })
    : s("circle", { class: "f" + one.tone, r: 3, cx: X(one.points[0][0]), cy: Y(one.points[0][1]) }));
  const band = options.band && series.length > 1 && s("path", { class: "area f" + series[1].tone, d: path(series[0].points) + "L" + path([...series[1].points].reverse()).slice(1) + "Z" });
  const middle = options.band && series.length > 1 && Math.floor(series[1].points.length / 2);
  const gap = band && s("text", { x: X(series[1].points[middle][0]), y: (Y(series[0].points[middle][1]) + Y(series[1].points[middle][1])) / 2 + 4, "text-anchor": "middle", class: "strong" }, options.band);
  const names = labelled ? endLabels(series, Y, width - right + 8) : [];
  const cursor = s("g", {});
  const first = series.map(one => `${one.name} from ${number(one.points[0][1])} to ${number(one.points.at(-1)[1])}`).join("; ");
  const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, height, role: options.small ? "img" : "slider", "aria-label": `${options.label}: ${first}` },
    grid, axis, !options.small && s("text", { x: width - right, y: height - 2, "text-anchor": "end" }, "epoch"), band, gap, lines, names, cursor);
  if (!options.small) reader(svg, series, { X, Y, top, bottom: height - bottom, width }, cursor, readout);
  return svg;
}

// Names at the ends of their lines, far enough apart to be read.
function endLabels(series, Y, x) {
  const ends = series.map(one => ({ one, y: Y(one.points.at(-1)[1]) })).sort((a, b) => a.y - b.y);
  ends.forEach((end, i) => { if (i) end.y = Math.max(end.y, ends[i - 1].y + 15); });
  const over = ends.length ? Math.max(0, (ends.at(-1).y - ends[0].y - (Y(ends.at(-1).one.points.at(-1)[1]) - Y(ends[0].one.points.at(-1)[1]))) / 2) : 0;
  return ends.map(({ one, y }) => s("text", { x, y: y - over + 4, class: `name f${one.tone}` }, one.name.length > 24 ? one.name.slice(0, 22) + "..." : one.name));
}

// Values under the pointer, or under the arrow keys.
function reader(svg, series, frame, cursor, readout) {
  const epochs = [...new Set(series.flatMap(one => one.points.map(p => p[0])))].sort((a, b) => a - b);
  let at = epochs.length - 1;
  const show = index => {
    at = Math.max(0, Math.min(epochs.length - 1, index));
    const epoch = epochs[at];
    const here = series.map(one => [one, one.points.find(p => p[0] === epoch)]).filter(([, p]) => p);
    const text = `Epoch ${epoch}: ` + here.map(([one, p]) => `${one.name} ${number(p[1], 4)}`).join(", ");
    svg.setAttribute("aria-valuenow", epoch);
    svg.setAttribute("aria-valuetext", text);
    readout.textContent = text;
    cursor.replaceChildren(s("line", { class: "cursor", x1: frame.X(epoch), x2: frame.X(epoch), y1: frame.top, y2: frame.bottom }),
      ...here.map(([one, p]) => s("circle", { class: "f" + one.tone, cx: frame.X(epoch), cy: frame.Y(p[1]), r: 4 })));
  };
  make(svg, { tabindex: 0, "aria-valuemin": epochs[0], "aria-valuemax": epochs.at(-1), "aria-valuenow": epochs[at] }, []);
  show(at);
  cursor.replaceChildren();
  svg.addEventListener("pointermove", event => {
    const x = (event.clientX - svg.getBoundingClientRect().left);
    const apart = epochs.map(epoch => Math.abs(frame.X(epoch) - x));
    show(apart.indexOf(Math.min(...apart)));
  });
  svg.addEventListener("focus", () => show(at));
  svg.addEventListener("keydown", event => {
    const to = { ArrowLeft: at - 1, ArrowDown: at - 1, ArrowRight: at + 1, ArrowUp: at + 1, Home: 0, End: epochs.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    show(to);
  });
}

// A table that sorts. columns: [{name, key, text?}]; numbers sort as numbers, empty cells last.
function sortable(columns, rows, caption) {
  const body = h("tbody", {});
  const isNumber = column => rows.some(row => known(row[column.key]));
  let order = [...rows];
  const fill = () => body.replaceChildren(...order.map(row => h("tr", {}, columns.map((column, i) => {
    const value = row[column.key];
    const shown = known(value) ? (column.text || number)(value) : value ?? "";
    return h(i ? "td" : "th", { class: isNumber(column) ? "num" : null, scope: i ? null : "row" }, shown);
  }))));
  const heads = columns.map(column => h("th", { scope: "col", class: isNumber(column) ? "num" : null, "aria-sort": "none" },
    h("button", { type: "button", onclick: () => sort(column) }, column.name)));
  function sort(column) {
    const head = heads[columns.indexOf(column)], down = head.getAttribute("aria-sort") === "ascending";
    heads.forEach(other => other.setAttribute("aria-sort", other === head ? (down ? "descending" : "ascending") : "none"));
    const empty = v => v === null || v === undefined || v === "";
    order = [...rows].sort((a, b) => {
      const [u, v] = [a[column.key], b[column.key]];
      if (empty(u) || empty(v)) return empty(u) - empty(v);
      const by = known(u) && known(v) ? u - v : String(u).localeCompare(String(v), "en", { numeric: true });
      return down ? -by : by;
    });
    fill();
  }
  fill();
  const csv = () => [columns.map(c => c.name), ...order.map(row => columns.map(c => row[c.key]))].map(line => line.map(cell).join(",")).join("\r\n") + "\r\n";
  const table = h("table", {}, captioned(caption), h("thead", {}, h("tr", {}, heads)), body);
  const status = h("span", { role: "status", class: "soft" });
  const copy = h("button", { type: "button", onclick: async () => { status.textContent = await copied(csv()) ? `Copied ${rows.length} rows` : "Could not copy: select the table instead"; } }, "Copy as CSV");
  return [h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption }, table), h("div", { class: "tools" }, copy, status)];
}
// A spreadsheet takes text that starts with = + - @ for a formula; numbers are left as they are.
function cell(value) {
  if (value === null || value === undefined) return "";
  if (known(value)) return String(value);
  const text = /^[=+\-@\t\r]/.test(value) ? "'" + value : String(value);
  return /[",\r\n]/.test(text) ? '"' + text.replaceAll('"', '""') + '"' : text;
}
async function copied(text) {
  try { await navigator.clipboard.writeText(text); return true; } catch (refused) {
    const area = h("textarea", { "aria-hidden": "true", class: "skip" });
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}
