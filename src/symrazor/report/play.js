"use strict";
// The page of `symrazor serve`: drop files, move an example by hand, and watch the outputs.

const start = JSON.parse(document.getElementById("document").textContent);
const at = id => document.getElementById(id);
const FORMATS = {
  image: "one or more images, or a .npz file",
  volume: "a .npz file with x",
  series: "a .csv or .npz file",
  set: "a .csv or .npz file",
  vector: "a .csv, .parquet or .npz file",
};
let names = start.samples,
  chosen = 0,
  swept = start.controls[0] && start.controls[0].name,
  asked = 0;
const values = {};

async function post(path, body) {
  const response = await fetch(path, {
    method: "POST",
    headers: { "Content-Type": "application/json", "X-Symrazor-Token": start.token },
    body: JSON.stringify(body),
  });
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.error || "The request failed.");
  return answer;
}
function say(text, bad = false) {
  at("message").textContent = text;
  at("message").className = bad ? "note bad" : "note";
}

const probability = value => (value >= 0.9995 ? ">" + NBSP + "99.9" + NBSP + "%" : (100 * value).toFixed(1) + NBSP + "%");
const spreadText = (value, isClass) =>
  known(value) ? " ±" + NBSP + (isClass ? (100 * value).toFixed(1) : number(value)) : "";

// Files

function base64(buffer) {
  const bytes = new Uint8Array(buffer),
    parts = [];
  for (let k = 0; k < bytes.length; k += 32768) parts.push(String.fromCharCode(...bytes.subarray(k, k + 32768)));
  return btoa(parts.join(""));
}
async function open(list) {
  if (!list.length) return;
  say("Reading …");
  try {
    const files = await Promise.all(
      [...list].map(async file => ({ name: file.name, content: base64(await file.arrayBuffer()) })),
    );
    const answer = await post("/open", { files });
    names = answer.samples;
    chosen = 0;
    const more = answer.total > names.length ? `, of which the first ${names.length} are shown` : "";
    say([`${answer.total} ${answer.total === 1 ? "sample" : "samples"}${more}.`, ...answer.notes].join(" "));
    listSamples();
    listPredictions(answer.predictions);
    reset();
  } catch (error) {
    say(error.message, true);
  }
}
function listPredictions(rows) {
  at("all").hidden = !rows.length;
  const isClass = rows.length > 0 && rows[0].label !== null;
  const outputs = rows.length ? rows[0].outputs.map(o => o.name) : [];
  const heads = isClass ? ["Sample", "Prediction", "Probability"] : ["Sample", ...outputs];
  const text = output => number(output.value) + spreadText(output.spread, false);
  const best = row => row.outputs.find(o => o.name === row.label);
  at("table").replaceChildren(
    h(
      "table",
      {},
      h("thead", {}, h("tr", {}, heads.map((name, i) => h("th", { scope: "col", class: i ? "num" : null }, name)))),
      h(
        "tbody",
        {},
        rows.map((row, i) =>
          h(
            "tr",
            {},
            h("th", { scope: "row" }, h("button", { type: "button", onclick: () => choose(i) }, names[i])),
            isClass
              ? [
                  h("td", { class: "num" }, row.label),
                  h("td", { class: "num" }, probability(best(row).value) + spreadText(best(row).spread, true)),
                ]
              : row.outputs.map(output => h("td", { class: "num" }, text(output))),
          ),
        ),
      ),
    ),
  );
}

// Examples and controls

function listSamples() {
  at("stage").hidden = !names.length;
  at("sample").replaceChildren(...names.map((name, i) => h("option", { value: i }, `${i + 1}: ${name}`)));
}
function choose(number) {
  chosen = (number + names.length) % names.length;
  at("sample").value = String(chosen);
  update();
}
function reset() {
  for (const control of start.controls) values[control.name] = control.start;
  drawControls();
  choose(chosen);
}
function drawControls() {
  const hands = start.controls.map(control => {
    const isSwitch = control.high - control.low === 1;
    const output = h("output", {}, shown(control));
    const changed = event => {
      values[control.name] = isSwitch ? Number(event.target.checked) : Number(event.target.value);
      output.textContent = shown(control);
      if (!isSwitch) swept = control.name;
      update();
    };
    const input = h("input", {
      type: isSwitch ? "checkbox" : "range",
      id: `move-${control.name}`,
      min: control.low,
      max: control.high,
      step: control.step,
      oninput: changed,
    });
    if (isSwitch) input.checked = values[control.name] === 1;
    else input.value = String(values[control.name]);
    const label = h("label", { for: `move-${control.name}` }, control.label);
    return h("div", { class: isSwitch ? "hand switch" : "hand" }, isSwitch ? [input, label] : [label, output, input]);
  });
  const back = h("button", { type: "button", id: "reset", onclick: reset }, "Put it back");
  at("controls").replaceChildren(...hands, h("div", {}, back));
}
const shown = control => `${number(values[control.name]) || "0"}${control.unit ? " " + control.unit : ""}`;

// Outputs

async function update() {
  if (!names.length) return;
  const mine = (asked += 1);
  try {
    const answer = await post("/predict", { sample: chosen, move: values });
    if (mine !== asked) return;
    at("original").replaceChildren(picture(answer.pictures[0]));
    at("current").replaceChildren(picture(answer.pictures[1]));
    drawOutputs(answer.predictions);
    const curves = await post("/sweep", { sample: chosen, move: values, control: swept });
    if (mine === asked) drawCurve(curves);
    document.documentElement.dataset.ready = String(mine);
  } catch (error) {
    say(error.message, true);
  }
}
function picture(part) {
  if (part.image) return h("img", { src: part.image, alt: "the example as a picture" });
  if (part.lines) return lines(part.lines);
  if (part.points) return points(part.points);
  const columns = start.columns || part.numbers.map((_, i) => `column ${i + 1}`);
  return h(
    "table",
    {},
    h(
      "tbody",
      {},
      part.numbers.map((value, i) => h("tr", {}, h("th", { scope: "row" }, columns[i]), h("td", { class: "num" }, number(value)))),
    ),
  );
}
function lines(all) {
  const flat = all.flat(),
    low = Math.min(...flat),
    range = Math.max(...flat) - low || 1,
    last = all[0].length - 1;
  return s(
    "svg",
    { viewBox: `0 -4 ${last} 108`, preserveAspectRatio: "none", role: "img", "aria-label": "the example as a curve" },
    all.map((line, k) =>
      s("polyline", {
        points: line.map((v, i) => `${i},${(1 - (v - low) / range) * 100}`).join(" "),
        class: `line s${k % 6}`,
        "vector-effect": "non-scaling-stroke",
      }),
    ),
  );
}
function points(all) {
  const flat = all.flat(),
    size = Math.max(...flat.map(Math.abs)) * 1.1 || 1;
  return s(
    "svg",
    { viewBox: `${-size} ${-size} ${2 * size} ${2 * size}`, role: "img", "aria-label": "the example as points" },
    all.map((p, i) => s("circle", { class: `f${i % 6}`, cx: p[0], cy: -(p[1] || 0), r: size / 30 })),
  );
}
function drawOutputs([before, after]) {
  const isClass = after.label !== null,
    ranges = after.outputs.flatMap((o, i) => [o.value, before.outputs[i].value].flatMap(v => [v - (o.spread || 0), v + (o.spread || 0)])),
    low = isClass ? 0 : Math.min(...ranges),
    high = isClass ? 1 : Math.max(...ranges);
  const share = v => `${100 * Math.min(1, Math.max(0, (v - low) / (high - low || 1)))}%`;
  const order = after.outputs.map((_, i) => i);
  if (isClass) order.sort((a, b) => after.outputs[b].value - after.outputs[a].value);
  const rows = order.slice(0, 8).map(i => {
    const output = after.outputs[i],
      was = before.outputs[i],
      best = isClass && output.name === after.label;
    const fill = h("span", { class: best || !isClass ? "b1" : "b5" }),
      line = h("span", { class: "was" }),
      spread = h("span", { class: "spread" });
    [fill, line].forEach((node, k) => ((node.style.left = "0"), (node.style.width = share([output, was][k].value))));
    spread.style.left = share(output.value - (output.spread || 0));
    spread.style.right = `calc(100% - ${share(output.value + (output.spread || 0))})`;
    const text = isClass ? probability(output.value) : number(output.value);
    return [
      h("dt", { class: best ? "best" : null }, output.name),
      h("dd", { class: "lane" }, fill, known(output.spread) && spread, line),
      h("dd", { class: best ? "best" : null }, text + spreadText(output.spread, isClass)),
    ];
  });
  const difference = Math.max(...after.outputs.map((o, i) => Math.abs(o.value - before.outputs[i].value)));
  const moved = start.controls.some(control => values[control.name] !== control.start);
  const stays = isClass ? difference < 0.02 : difference < 0.02 * (high - low || 1) || difference < (after.outputs[0].spread || 0) / 10;
  const sentence = !moved
    ? "Move the example: does the output follow?"
    : isClass && after.label !== before.label
      ? `The prediction changes from “${before.label}” to “${after.label}”.`
      : stays
        ? "The output stays."
        : "The output follows the movement.";
  at("outputs").replaceChildren(
    h("p", { class: "verdict " + (!moved ? "" : stays ? "stay" : "follow"), "aria-live": "polite" }, sentence),
    h("dl", { class: "out" }, rows),
    h("p", { class: "note" }, "Vertical line: the example as it is. Thin bar: one standard deviation."),
  );
}
function drawCurve(data) {
  const control = start.controls.find(c => c.name === swept),
    isClass = data.curves.every(curve => curve.values.every(v => v >= 0 && v <= 1)) && start.classes;
  const width = 520,
    height = 230,
    left = 52,
    bottom = 40,
    top = 10;
  const all = data.curves.flatMap(c => c.values.flatMap((v, i) => [v - (c.spread ? c.spread[i] : 0), v + (c.spread ? c.spread[i] : 0)]));
  const [low, high] = isClass ? [0, 1] : [Math.min(...all), Math.max(...all)];
  const X = v => left + ((width - left - 12) * (v - data.at[0])) / (data.at.at(-1) - data.at[0] || 1),
    Y = v => top + (height - top - bottom) * (1 - (Math.min(high, Math.max(low, v)) - low) / (high - low || 1));
  const path = values => values.map((v, i) => `${X(data.at[i]).toFixed(1)} ${Y(v).toFixed(1)}`);
  const curves = data.curves.map((curve, k) => {
    const upper = curve.spread && path(curve.values.map((v, i) => v + curve.spread[i])),
      lower = curve.spread && path(curve.values.map((v, i) => v - curve.spread[i])).reverse();
    return [
      curve.spread && s("path", { class: `area f${k}`, d: `M${[...upper, ...lower].join("L")}Z` }),
      s("path", { class: `line s${k} dash${k}`, d: "M" + path(curve.values).join("L") }),
    ];
  });
  const marks = ticks(low, high === low ? low + 1 : high, 4),
    steps = ticks(data.at[0], data.at.at(-1), 5),
    here = X(values[swept]);
  at("curve").replaceChildren(
    h("h3", {}, "Along one movement"),
    h(
      "ul",
      { class: "keys" },
      data.curves.map((curve, k) => h("li", {}, h("i", { class: "b" + k }), curve.name)),
    ),
    s(
      "svg",
      { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Outputs along: ${control.label}` },
      marks.map(v => [
        s("line", { class: "axis", x1: left, x2: width - 12, y1: Y(v), y2: Y(v) }),
        s("text", { x: left - 8, y: Y(v) + 4, "text-anchor": "end" }, number(v, 2)),
      ]),
      steps.map(v => s("text", { x: X(v), y: height - bottom + 18, "text-anchor": "middle" }, number(v))),
      s("text", { x: width - 12, y: height - 4, "text-anchor": "end" }, `${control.label} (${control.unit})`),
      curves,
      s("line", { class: "cursor", x1: here, x2: here, y1: top, y2: height - bottom }),
    ),
    h("p", { class: "note" }, "All other movements as they are set. A flat line: the network is invariant. Bands: one standard deviation."),
  );
}

// Start

at("run").textContent = start.run;
at("question").textContent = start.question;
at("headline").textContent = start.headline || "Try the network";
const size = start.columns && start.kind === "vector" ? `with ${start.columns.join(", ")}` : start.shape.join(" × ");
at("formats").textContent = `${FORMATS[start.kind] || "a .npz file"}, ${size}`;
at("files").addEventListener("change", event => {
  open([...event.target.files]);
  event.target.value = ""; // so that the same file can be chosen again
});
const drop = at("drop");
for (const name of ["dragenter", "dragover"])
  drop.addEventListener(name, event => {
    event.preventDefault();
    drop.classList.add("over");
  });
for (const name of ["dragleave", "drop"]) drop.addEventListener(name, () => drop.classList.remove("over"));
drop.addEventListener("drop", event => {
  event.preventDefault();
  open(event.dataTransfer.files);
});
at("sample").addEventListener("change", event => choose(Number(event.target.value)));
at("before").addEventListener("click", () => choose(chosen - 1));
at("after").addEventListener("click", () => choose(chosen + 1));
listSamples();
if (names.length) reset();
else say("Drop a file to begin.");
