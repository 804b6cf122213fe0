// Sections of a question. Each returns nodes, or nothing where the document has nothing to show.

const GROUPS = new Map([["translation", "-kept"]]);
const NETWORKS = new Map([["relaxed", 0], ["convolutional", 1], ["fully connected", 2]]);
function toneOf(map, name, from) {
  if (!map.has(name)) map.set(name, [0, 3, 4, 5, 1, 2].filter(t => t >= from)[map.size % 4] ?? 5);
  return map.get(name);
}
const network = name => toneOf(NETWORKS, name, 3);
const toneOfPath = (path, layer) => path.group ? toneOf(GROUPS, path.group, 0) : layer.relaxed ? "-free" : "-plain";
const sum = values => values.reduce((total, value) => total + (value || 0), 0);
const effective = part => sum(part.paths.map(path => path.effective_parameters));
const parameters = part => sum(part.paths.map(path => path.parameters));
const complexity = e => known(e.log_likelihood) && known(e.log_evidence) ? e.log_likelihood - e.log_evidence : null;
const place = (layer, i) => layer.relaxed ? (layer.name ? layer.name + "." : "") + "paths." + i : layer.name;
const layerName = layer => layer.name === "" ? "network" : layer.name;
const kindOfPath = (path, layer) => path.group ? path.group + "-equivariant" : layer.relaxed ? "free: may use position" : "fixed layer";

function facts(question, chosen) {
  const reading = chosen.reading, test = reading.test || {}, e = reading.evidence || {}, layers = reading.layers || [];
  const others = question.candidates.length > 1, of = others ? `, ${chosen.name}` : "";
  const rows = [
    others && known(question.margin) && ["Margin", `${number(question.margin)}${NBSP}nats`, "between the best and the second"],
    known(test.accuracy) && [`Test accuracy${of}`, percentExact(test.accuracy), known(test.ece) ? `calibration error ${number(test.ece, 2)}` : null],
    known(test.mse) && [`Test error${of}`, number(test.mse), "mean square"],
    known(e.log_evidence) && [`Log evidence${of}`, number(e.log_evidence), known(e.per_datum) ? `${number(e.per_datum)} per datum` : null],
    layers.length > 0 && ["Parameters the data determine", amount(sum(layers.map(effective))), `of ${number(sum(layers.map(parameters)))}`],
  ].filter(Boolean);
  return rows.length > 0 && h("dl", { class: "facts" }, rows.map(([name, value, more]) => h("div", {}, h("dt", {}, name), h("dd", {}, value, more && h("small", {}, more)))));
}
const percentExact = value => (100 * value).toFixed(1) + NBSP + "%";

function comparison(question) {
  const rows = question.candidates.filter(c => known((c.reading.evidence || {}).log_evidence));
  if (rows.length < 2) return null;
  const best = Math.max(...rows.map(c => c.reading.evidence.log_evidence));
  const widest = Math.max(1, ...rows.map(c => best - c.reading.evidence.log_evidence));
  const cells = c => {
    const e = c.reading.evidence, test = c.reading.test || {}, behind = best - e.log_evidence;
    const meter = h("span", { class: "meter b" + network(c.name) });
    meter.style.width = `${100 * behind / widest}%`;
    return [h("th", { scope: "row" }, h("span", {}, c.name)), h("td", { class: "num" }, behind ? signed(-behind) : "best"), h("td", { class: "bars" }, meter), h("td", { class: "num" }, number(e.log_evidence)), h("td", { class: "num" }, number(e.log_likelihood)),
      h("td", { class: "num" }, number(complexity(e))), h("td", { class: "num" }, known(test.accuracy) ? percentExact(test.accuracy) : number(test.mse))];
  };
  const classifier = rows.some(c => known((c.reading.test || {}).accuracy));
  const heads = ["Network", "Nats behind", "", "Log evidence", "Fit", "Complexity", classifier ? "Test accuracy" : "Test error"];
  const numeric = i => i === 1 || i > 2;
  const head = h("tr", {}, heads.map((name, i) => name ? h("th", { scope: "col", class: numeric(i) ? "num" : null }, name) : h("td", {})));
  const curves = question.candidates.filter(c => c.series && c.series.log_evidence).map(c => ({ name: c.name, x: c.series.epoch, y: c.series.log_evidence, tone: network(c.name) }));
  return [
    h("h3", {}, "The candidates"),
    h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Candidates by evidence" },
      h("table", {}, captioned("Log evidence = fit − complexity, in nats. Three nats are odds of twenty to one."), h("thead", {}, head), h("tbody", {}, rows.map(c => h("tr", {}, cells(c)))))),
    lineChart(curves, { label: "Log evidence over training", caption: "Log evidence of each candidate over training, from the training data alone. The table has the state that was kept." }),
  ];
}

function picture(candidate) {
  const layers = candidate.reading.layers || [];
  if (!layers.length) return null;
  const errors = layers.some(layer => Object.keys(layer.equivariance_error || {}).length);
  const panel = h("div", { class: "panel", role: "status", "aria-label": "The chosen layer" });
  const buttons = layers.map(layer => {
    const bars = h("span", { class: "split", "aria-hidden": "true" }, layer.paths.map(path => {
      const label = path.share < 0.12 ? "" : path.share < 0.3 ? percent(path.share) : `${path.path} ${percent(path.share)}`;
      const bar = h("span", { class: `b${toneOfPath(path, layer)} ${path.share < 0.12 ? "thin" : path.share < 0.45 ? "short" : ""}` }, label);
      bar.style.flex = `${Math.max(path.share || 0, 1e-6)} 1 0`;
      return bar;
    }));
    const said = layer.paths.map(path => `${path.path} ${percent(path.share)}`).join(", ");
    const error = worst(layer);
    return h("button", { type: "button", class: "row", "aria-pressed": "false", "aria-label": `Layer ${layerName(layer)}: ${said}; ${number(effective(layer))} effective parameters${error === null ? "" : "; error " + percent(error)}` },
      h("b", {}, layerName(layer)), bars, h("span", { class: "num" }, amount(effective(layer))), h("span", { class: "num" }, error === null ? "" : percent(error)));
  });
  const free = layer => layer.relaxed ? sum(layer.paths.filter(path => !path.group).map(path => path.share)) : -1;
  let pinned = layers.indexOf(layers.reduce((a, b) => free(b) > free(a) ? b : a));
  const show = index => {
    buttons.forEach((button, i) => button.setAttribute("aria-pressed", i === index));
    panel.replaceChildren(...describe(layers[index]));
  };
  buttons.forEach((button, i) => {
    button.addEventListener("click", () => { pinned = i; show(i); });
    button.addEventListener("focus", () => { pinned = i; show(i); });
    button.addEventListener("pointerenter", event => { if (event.pointerType === "mouse") show(i); });
    button.addEventListener("pointerleave", event => { if (event.pointerType === "mouse") show(pinned); });
  });
  show(pinned);
  const tones = new Map();
  layers.forEach(layer => layer.paths.forEach(path => tones.set(kindOfPath(path, layer), toneOfPath(path, layer))));
  return [
    h("h3", {}, layers.some(layer => layer.relaxed) ? "What each layer kept" : "The layers"),
    h("p", { class: "note" }, "From input to output. A bar is a layer, split by the share of each path in its effective parameters: those that the data determine rather than the prior. ",
      errors && "The error is what a transformed input changes beyond the transformation of the output; 0 is exactly equivariant, 141 % nothing of the kind."),
    keys([...tones]),
    h("div", { class: "layers" },
      h("div", {}, h("div", { class: "head", "aria-hidden": "true" }, h("span", {}, "Layer"), h("span", {}, "Share of its paths"), h("span", { class: "num" }, "Effective"), h("span", { class: "num" }, errors ? "Error" : "")),
        h("ol", {}, buttons.map(button => h("li", {}, button)))),
      panel),
  ];
}
const worst = layer => { const all = Object.values(layer.equivariance_error || {}).filter(known); return all.length ? Math.max(...all) : null; };

function describe(layer) {
  const errors = Object.entries(layer.equivariance_error || {});
  return [
    h("h4", {}, "Layer ", layerName(layer)),
    errors.map(([group, value]) => h("p", {}, `${group} error `, h("b", {}, percent(value) || "not finite"))),
    layer.paths.map(path => {
      const values = Object.entries(path.precision || {}), same = new Set(values.map(([, v]) => v)).size === 1;
      const precision = !values.length ? [["precision", "frozen"]] : same ? [["precision", number(values[0][1])]] : values.map(([name, v]) => [`precision of ${name}`, number(v)]);
      const rows = [["share", percent(path.share)], ["effective", amount(path.effective_parameters)], ["of parameters", number(path.parameters)], ...precision];
      return [h("h5", {}, h("i", { class: "b" + toneOfPath(path, layer) }), path.path), h("dl", {}, rows.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]))];
    }),
  ].flat(2);
}

function overTraining(candidate) {
  const data = candidate.series;
  if (!data) return null;
  const layers = candidate.reading.layers || [], found = [];
  if (data.log_evidence) {
    const curve = (name, y, tone) => ({ name, x: data.epoch, y, tone });
    found.push(lineChart([curve("Fit", data.log_likelihood || [], 0), curve("Evidence", data.log_evidence, 2)],
      { label: "Evidence and fit over training", band: "complexity", caption: "The evidence is the fit less the complexity, the shaded gap: what the fit has to pay for the parameters that it pins down." }));
  }
  const every = Object.values(data.precisions || {}).flatMap(Object.values).flat().filter(v => known(v) && v > 0);
  const small = (title, lines, options) => lineChart(lines, { ...options, small: true, title, label: title });
  const of = (values, layer) => layer.paths.flatMap((path, i) => {
    const held = values[place(layer, i)];
    if (!held) return [];
    const columns = Array.isArray(held) ? [[path.path, held]] : Object.entries(held);
    return columns.map(([name, y], dash) => ({ name: columns.length > 1 ? name : path.path, x: data.epoch, y, tone: toneOfPath(path, layer), dash: Math.min(dash, 2) }));
  });
  const grid = (values, options) => layers.map(layer => small(`Layer ${layerName(layer)}`, of(values, layer), options)).filter(Boolean);
  const precisions = every.length ? grid(data.precisions, { log: true, range: [Math.min(...every), Math.max(...every)] }) : [];
  const effectives = grid(data.effective_parameters || {}, { zero: true });
  if (precisions.length) found.push(h("h3", {}, "Precision over training"), h("p", { class: "note" }, "Of the prior of each path, one scale for all layers. A high precision holds weights near zero: it takes a path away."), h("div", { class: "grid" }, precisions));
  if (effectives.length) found.push(h("h3", {}, "Effective parameters over training"), h("p", { class: "note" }, "How many parameters of each path the data determine."), h("div", { class: "grid" }, effectives));
  return found.length && [h("h3", {}, "Fit and complexity"), ...found];
}

function invariances(candidate) {
  const held = Object.entries(candidate.reading.invariances || {}).map(([name, value]) => known(value) ? { name, width: value, unit: "" } : { name, ...value }).filter(row => known(row.width));
  if (!held.length) return null;
  const arc = row => {
    const degrees = /deg|°/.test(row.unit || "") ? row.width : /rad/.test(row.unit || "") ? row.width * 180 / Math.PI : null;
    if (degrees === null) return null;
    const a = Math.min(degrees, 179.9) * Math.PI / 180, x = 32 * Math.sin(a), y = -32 * Math.cos(a);
    return s("svg", { viewBox: "-40 -40 80 80", width: 80, height: 80, "aria-hidden": "true" }, s("circle", { r: 32, fill: "none", class: "base" }), s("path", { class: "f-kept", opacity: 0.8, d: `M0 0L${-x} ${y}A32 32 0 ${degrees > 90 ? 1 : 0} 1 ${x} ${y}Z` }));
  };
  return [h("h3", {}, "What leaves the answer alone"), h("p", { class: "note" }, "Widths of the learned distribution of transformations, to both sides. Zero means that the transformation changes the answer."),
    h("dl", { class: "facts" }, held.map(row => h("div", {}, h("dt", {}, row.name), h("dd", {}, (row.width ? "±" + NBSP : "") + number(row.width) + (row.unit ? NBSP + row.unit : "")), arc(row))))];
}

const pathName = name => { const found = /^(.*?)\.?paths\.(\d+)$/.exec(name); return found ? `Layer ${found[1]}, path ${Number(found[2]) + 1}` : `Layer ${name}`; };
const image = (source, text) => h("img", { src: source, alt: text });
function filters(question) {
  const layers = Object.entries(question.filters || {});
  const anchors = Object.entries(question.anchors || {}).filter(([, a]) => Array.isArray(a.points) && Array.isArray(a.shape));
  if (!layers.length && !anchors.length) return null;
  return [
    h("h3", {}, "Learned filters"),
    layers.length > 0 && h("p", { class: "note" }, "Positive weights in green, negative in red; strength is the opacity, by layer."),
    h("div", { class: "grid wide" }, layers.map(([name, all]) => h("div", {}, h("h4", {}, pathName(name)), h("ul", { class: "images filters" }, all.map((source, i) => h("li", {}, image(source, `filter ${i + 1} of ${pathName(name)}`))))))),
    anchors.length > 0 && h("h3", {}, "Anchors"),
    h("div", { class: "grid" }, anchors.map(([name, a]) => {
      const [rows, columns] = a.shape;
      const dots = a.points.map(([y, x]) => s("circle", { class: "f0", cx: x, cy: y, r: Math.max(rows, columns) / 40 }));
      return h("div", {}, h("h4", {}, name), s("svg", { viewBox: `${-columns / 2} ${-rows / 2} ${columns} ${rows}`, role: "img", "aria-label": `${a.points.length} anchors on a map of ${rows} by ${columns}` }, s("rect", { x: -columns / 2, y: -rows / 2, width: columns, height: rows, fill: "none", class: "base", "vector-effect": "non-scaling-stroke" }), dots));
    })),
  ];
}

function examples(question) {
  const held = question.examples || {}, labels = held.labels || [], images = held.images || [];
  const label = i => labels[i] === undefined ? `example ${i + 1}` : labels[i];
  const found = [];
  if (held.transformed) {
    found.push(h("h3", {}, "Orbits"), h("p", { class: "note" }, "An example and draws from the learned distribution of its transformations: to the network they are the same."),
      held.transformed.map((orbit, i) => h("div", { class: "orbit" }, images[i] && image(images[i], `${label(i)}, as it is`), h("ul", { class: "images" }, orbit.map((source, k) => h("li", {}, image(source, `${label(i)}, draw ${k + 1}`)))))));
  }
  if (images.length) found.push(h("h3", {}, "Examples"), h("ul", { class: "images" }, images.map((source, i) => h("li", {}, image(source, `example ${i + 1}`), h("span", { title: labels[i] }, labels[i])))));
  if (held.lines) found.push(h("h3", {}, "Examples"), h("div", { class: "grid" }, held.lines.map((y, i) => lineChart([{ name: label(i), x: y.map((_, t) => t), y, tone: 0 }], { small: true, title: label(i), label: label(i) }))));
  return found;
}

function calibration(question) {
  const c = question.calibration;
  if (!c || !Array.isArray(c.confidence) || !c.confidence.length) return null;
  const total = sum(c.count), most = Math.max(...c.count);
  const draw = (box, width) => {
    const side = Math.min(width, 420), left = 44, plot = side - left - 12, foot = plot + 10;
    const X = v => left + plot * v, Y = v => 10 + plot * (1 - v);
    const grid = [0, 0.5, 1].map(v => [s("line", { class: "axis", x1: left, x2: left + plot, y1: Y(v), y2: Y(v) }), s("text", { x: left - 8, y: Y(v) + 4, "text-anchor": "end" }, percent(v) || "0 %"), s("text", { x: X(v), y: foot + 18, "text-anchor": "middle" }, percent(v) || "0 %")]);
    const dots = c.confidence.map((p, i) => [s("line", { class: "line s0", x1: X(p), x2: X(p), y1: Y(p), y2: Y(c.accuracy[i]) }), s("circle", { class: "f0", cx: X(p), cy: Y(c.accuracy[i]), r: 3 + 7 * Math.sqrt(c.count[i] / most) }, s("title", {}, `says ${percent(p)}, right ${percent(c.accuracy[i])}, ${number(c.count[i])} data`))]);
    const said = c.confidence.map((p, i) => `says ${percent(p)}, right ${percent(c.accuracy[i])}`).join("; ");
    const svg = s("svg", { viewBox: `0 0 ${side} ${side + 12}`, role: "img", "aria-label": `Reliability: ${said}` }, grid, s("line", { class: "base dash1", x1: X(0), y1: Y(0), x2: X(1), y2: Y(1) }), dots, s("text", { x: left + plot, y: foot + 34, "text-anchor": "end" }, "confidence"), s("text", { x: left + 4, y: 8 }, "accuracy"));
    svg.style.maxWidth = `${side}px`;
    box.replaceChildren(svg);
  };
  return [h("h3", {}, "Calibration"), beside(`How sure the network is, and how often it is right, over ${number(total)} ${c.on || "data"}. On the dashed line it knows what it knows; larger dots stand for more data.`, draw)];
}

function beside(caption, draw) {
  const found = figure(caption, draw);
  found.className = "beside";
  return found;
}

function dynamics(candidate) {
  const held = candidate.reading.conserved;
  if (!Array.isArray(held) || !held.length) return null;
  const largest = Math.max(...held.map(one => one.singular_value || 0)) || 1;
  const rows = held.map(one => {
    const meter = h("span", { class: "meter b1" });
    meter.style.width = `${100 * (one.singular_value || 0) / largest}%`;
    return h("tr", {}, h("th", { scope: "row" }, one.name), h("td", { class: "bars" }, meter), [one.singular_value, one.parallelness, one.drift].map(v => h("td", { class: "num" }, number(v))));
  });
  return [
    h("h3", {}, "What is conserved"),
    h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Conserved quantities" }, h("table", {}, captioned("Learned generators by their singular values. Parallelness is how much of one lies in the space of known symmetries; drift is how far the quantity moves along a trajectory."),
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Quantity"), h("td", {}), ["Singular value", "Parallelness", "Drift"].map(name => h("th", { scope: "col", class: "num" }, name)))), h("tbody", {}, rows))),
    h("div", { class: "grid" }, held.filter(one => Array.isArray(one.matrix) || one.flow).map(one => h("div", {}, h("h4", {}, one.name), matrix(one), flow(one)))),
  ];
}
function matrix(one) {
  const values = one.matrix;
  if (!Array.isArray(values) || !Array.isArray(values[0])) return null;
  const n = values[0].length, most = Math.max(...values.flat().map(Math.abs)) || 1;
  const cells = values.flatMap((row, i) => row.map((v, j) => [s("rect", { class: v >= 0 ? "f-kept" : "f-free", x: 40 * j, y: 40 * i, width: 39, height: 39, opacity: 0.5 * Math.abs(v) / most }, s("title", {}, number(v))), n <= 6 && s("text", { x: 40 * j + 20, y: 40 * i + 24, "text-anchor": "middle", class: "strong" }, number(v, 2))]));
  return s("svg", { viewBox: `0 0 ${40 * n} ${40 * values.length}`, role: "img", "aria-label": `Generator of ${one.name}: ` + values.map(row => row.map(v => number(v, 2)).join(" ")).join("; ") }, s("rect", { class: "base", fill: "none", width: 40 * n - 1, height: 40 * values.length - 1 }), cells);
}
// Points of one curve, several curves, or arrows [x, y, dx, dy].
function flow(one) {
  if (!Array.isArray(one.flow) || !one.flow.length) return null;
  const arrows = !Array.isArray(one.flow[0][0]) && one.flow[0].length === 4;
  const curves = arrows ? one.flow.map(([x, y, dx, dy]) => [[x, y], [x + dx, y + dy]]) : Array.isArray(one.flow[0][0]) ? one.flow : [one.flow];
  const points = curves.flat().filter(([x, y]) => known(x) && known(y));
  if (!points.length) return null;
  const reach = 1.08 * Math.max(1e-9, ...points.flat().map(Math.abs));
  const lines = curves.map(curve => [s("path", { class: "line s0", "vector-effect": "non-scaling-stroke", d: "M" + curve.filter(([x, y]) => known(x) && known(y)).map(([x, y]) => `${100 * x / reach} ${-100 * y / reach}`).join("L") }), s("circle", { class: "f0", r: 2, cx: 100 * curve[0][0] / reach, cy: -100 * curve[0][1] / reach })]);
  return s("svg", { viewBox: "-100 -100 200 200", role: "img", "aria-label": `Phase portrait of the flow of ${one.name}` }, s("line", { class: "axis", x1: -100, x2: 100 }), s("line", { class: "axis", y1: -100, y2: 100 }), lines);
}

function cost(question) {
  const c = question.collapse, layers = Array.isArray(question.costs) ? question.costs : [];
  if (!c && !layers.length) return null;
  const saved = (before, after) => known(before) && known(after) && before ? signed(100 * (after - before) / before) + NBSP + "%" : "";
  const heads = names => h("thead", {}, h("tr", {}, names.map((name, i) => h("th", { scope: "col", class: i ? "num" : null }, name))));
  const row = (name, cells) => h("tr", {}, h("th", { scope: "row" }, name), cells.map(text => h("td", { class: "num" }, text)));
  const wrap = (label, table) => h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label }, table);
  const found = [h("h3", {}, "What it costs")];
  if (typeof c === "string") found.push(h("pre", {}, c));
  else if (c && c.refused) found.push(h("p", { class: "note" }, `The network was not collapsed: ${c.refused}`));
  else if (c) {
    const totals = [["Parameters", c.parameters], ["Operations per datum", c.flops], [`Milliseconds for ${number(c.data)} data`, c.latency_ms]].filter(([, pair]) => pair);
    const fates = (c.layers || []).flatMap(layer => layer.paths.filter(path => path.fate === "dropped").map(path => `${path.path} of layer ${layer.name || "network"}`));
    found.push(h("p", { class: "note" }, fates.length ? `Collapsed to a plain network, without ${fates.join(", ")}.` : "Collapsed to a plain network: no path was dropped.", c.change ? ` Outputs change by ${number(c.change.rms, 2)} of their size.` : ""),
      wrap("Cost before and after", h("table", {}, captioned("The whole network, before and after"), heads(["", "Before", "After", "Change"]), h("tbody", {}, totals.map(([name, pair]) => row(name, [number(pair.before), number(pair.after), saved(pair.before, pair.after)]))))));
  }
  const after = layers.some(one => known(one.flops_after));
  if (layers.length) found.push(wrap("Cost of each layer", h("table", {}, captioned("Each layer: parameters, and operations per datum"), heads(["Layer", "Parameters", after && "After", "Operations", after && "After"].filter(Boolean)),
    h("tbody", {}, layers.map(one => row(`${one.layer || "network"} ${one.type || ""}`, after ? [number(one.parameters), number(one.parameters_after), number(one.flops), number(one.flops_after)] : [number(one.parameters), number(one.flops)]))))));
  return found;
}
