"use strict";
// Primitives: elements, numbers, ticks. Strings are always inserted as text, never parsed as markup.

const SVG = "http://www.w3.org/2000/svg";
const NBSP = "\u00a0",
  MINUS = "\u2212";

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
  if (size >= 1e7 || size < 1e-4)
    text = value.toExponential(1).replace(/e\+?(.*)/, (_, power) => NBSP + "×" + NBSP + "10" + raised(power));
  else if (size >= 100 || Number.isInteger(value)) text = Math.round(value).toLocaleString("en-US");
  else text = String(Number(value.toPrecision(digits)));
  return text.replaceAll("-", MINUS);
}
const amount = value => (value > 0 && value < 0.05 ? "<" + NBSP + "0.1" : number(value));
const raised = power =>
  power.replace(/./g, c =>
    c === "-" ? "\u207b" : "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079"[c],
  );
const signed = value => (value > 0 ? "+" : "") + number(value);
function percent(value) {
  if (!known(value)) return "";
  if (value > 0 && value < 1e-4) return "<" + NBSP + "0.01" + NBSP + "%";
  const scaled = 100 * value;
  return (scaled >= 9.95 ? scaled.toFixed(0) : String(Number(scaled.toPrecision(2)))) + NBSP + "%";
}

function ticks(low, high, count) {
  const raw = (high - low) / Math.max(1, count),
    power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].find(m => m * power >= raw * 0.999) * power;
  const marks = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k += 1) marks.push(k * step);
  return marks.length < 2 && count < 9 ? ticks(low, high, count + 1) : marks;
}
function logTicks(low, high) {
  const marks = [];
  for (let k = Math.floor(Math.log10(low)); k <= Math.ceil(Math.log10(high)); k += 1) marks.push(10 ** k);
  const inside = marks.filter(v => v >= low * 0.999 && v <= high * 1.001);
  if (inside.length > 1) return inside.filter((_, i) => inside.length < 6 || i % 2 === 0);
  return [low, high];
}

// Fold nodes away under a summary. A section that the reader opened stays open when a tab redraws it.
const opened = new Set();
function fold(summary, ...nodes) {
  const details = h("details", { class: "fold", open: opened.has(summary) }, h("summary", {}, summary), nodes);
  details.addEventListener("toggle", () => opened[details.open ? "add" : "delete"](summary));
  return details;
}
