// Parts of a question: key figures, candidates, layers and training curves. Each function returns nodes, or
// null if the document has no data for it.

const GROUPS = new Map([["translation", "-kept"]]);
const NETWORKS = new Map([
  ["relaxed", 0],
  ["convolutional", 1],
  ["fully connected", 2],
]);
function toneOf(map, name, from) {
  if (!map.has(name)) map.set(name, [0, 3, 4, 5, 1, 2].filter(t => t >= from)[map.size % 4] ?? 5);
  return map.get(name);
}
const network = name => toneOf(NETWORKS, name, 3);
const toneOfPath = (path, layer) =>
  path.group ? toneOf(GROUPS, path.group, 0) : layer.relaxed ? "-free" : "-plain";
const sum = values => values.reduce((total, value) => total + (value || 0), 0);
const effective = part => sum(part.paths.map(path => path.effective_parameters));
const parameters = part => sum(part.paths.map(path => path.parameters));
const complexity = e =>
  known(e.log_likelihood) && known(e.log_evidence) ? e.log_likelihood - e.log_evidence : null;
const place = (layer, i) =>
  layer.relaxed ? (layer.name ? layer.name + "." : "") + "paths." + i : layer.name;
const layerName = layer => (layer.number ? `${layer.number}` : layer.name === "" ? "network" : layer.name);
const moduleOf = layer => (layer.number ? `${layer.number} (${layer.name})` : layerName(layer));
// Filters and costs belong to one network, whose layers have the names that the verdict uses.
const numbered = (question, name) => {
  const shown = question.candidates.find(c => c.name === question.network) || question.candidates[0];
  const layer = (shown.reading.layers || []).find(entry => entry.name === name);
  return layer ? layerName(layer) : name || "network";
};
const ofNetwork = question =>
  question.network && question.candidates.length > 1 ? `Network: “${question.network}”. ` : "";
const kindOfPath = (path, layer) =>
  path.group ? path.group + "-equivariant" : layer.relaxed ? "free (not equivariant)" : "plain layer";

function facts(question, chosen) {
  const reading = chosen.reading,
    used = question.final || question.candidates.find(c => c.name === question.chosen) || chosen,
    test = used.reading.test || {},
    e = reading.evidence || {},
    layers = reading.layers || [];
  const others = question.candidates.length > 1,
    of = others ? `, ${chosen.name}` : "",
    tested = others ? `, ${used.name}` : "";
  const rows = [
    others &&
      known(question.margin) && [
        "Evidence margin",
        `${number(question.margin)}${NBSP}nats`,
        "best over second-best candidate",
      ],
    known(test.accuracy) && [
      `Test accuracy${tested}`,
      percentExact(test.accuracy),
      known(test.ece) ? `calibration error ${number(test.ece, 2)}` : null,
    ],
    known(test.mse) && [`Test error${tested}`, number(test.mse), "mean squared error"],
    known(e.log_evidence) && [
      `Log evidence${of}`,
      number(e.log_evidence),
      known(e.per_datum) ? `${number(e.per_datum)} per data point` : null,
    ],
    layers.length > 0 && [
      `Effective parameters${of}`,
      amount(sum(layers.map(effective))),
      `of ${number(sum(layers.map(parameters)))}`,
    ],
  ].filter(Boolean);
  return (
    rows.length > 0 &&
    h(
      "dl",
      { class: "facts" },
      rows.map(([name, value, more]) =>
        h("div", {}, h("dt", {}, name), h("dd", {}, value, more && h("small", {}, more))),
      ),
    )
  );
}
const percentExact = value => (100 * value).toFixed(1) + NBSP + "%";

function comparison(question) {
  const rows = question.candidates.filter(c => known((c.reading.evidence || {}).log_evidence));
  if (rows.length < 2) return null;
  const best = Math.max(...rows.map(c => c.reading.evidence.log_evidence));
  const widest = Math.max(1, ...rows.map(c => best - c.reading.evidence.log_evidence));
  const cells = c => {
    const e = c.reading.evidence,
      test = c.reading.test || {},
      behind = best - e.log_evidence;
    const meter = h("span", { class: "meter b" + network(c.name) });
    meter.style.width = `${(100 * behind) / widest}%`;
    return [
      h("th", { scope: "row" }, h("span", {}, c.name)),
      h("td", { class: "num" }, behind ? signed(-behind) : "best"),
      h("td", { class: "bars" }, meter),
      h("td", { class: "num" }, number(e.log_evidence)),
      h("td", { class: "num" }, number(e.log_likelihood)),
      h("td", { class: "num" }, number(complexity(e))),
      h("td", { class: "num" }, known(test.accuracy) ? percentExact(test.accuracy) : number(test.mse)),
    ];
  };
  const classifier = rows.some(c => known((c.reading.test || {}).accuracy));
  const heads = [
    "Network",
    "Behind best (nats)",
    "",
    "Log evidence",
    "Fit",
    "Complexity",
    classifier ? "Test accuracy" : "Test error",
  ];
  const numeric = i => i === 1 || i > 2;
  const head = h(
    "tr",
    {},
    heads.map((name, i) =>
      name ? h("th", { scope: "col", class: numeric(i) ? "num" : null }, name) : h("td", {}),
    ),
  );
  const curves = question.candidates
    .filter(c => c.series && c.series.log_evidence)
    .map(({ name, series: { clock, epoch, log_evidence } }) => {
      return { name, clock, x: epoch, y: log_evidence, tone: network(name) };
    });
  return [
    h("h3", {}, "Evidence of the candidates"),
    h(
      "div",
      { class: "scroll", tabindex: 0, role: "group", "aria-label": "Candidates by evidence" },
      h(
        "table",
        {},
        captioned("Log evidence = fit − complexity, in nats. A difference of 3 nats means odds of 20 to 1."),
        h("thead", {}, head),
        h(
          "tbody",
          {},
          rows.map(c => h("tr", {}, cells(c))),
        ),
      ),
    ),
    lineChart(curves, {
      label: "Log evidence over training",
      caption:
        "Log evidence of each candidate over training, computed from the training data only. " +
        "The table shows the state that was kept.",
    }),
  ];
}

function picture(candidate) {
  const layers = candidate.reading.layers || [];
  if (!layers.length) return null;
  const errors = layers.some(layer => Object.keys(layer.equivariance_error || {}).length);
  const panel = h("div", { class: "panel", role: "status", "aria-label": "The selected layer" });
  const buttons = layers.map(layer => {
    const bars = h(
      "span",
      { class: "split", "aria-hidden": "true" },
      layer.paths.map(path => {
        const label =
          path.share < 0.12
            ? ""
            : path.share < 0.3
              ? percent(path.share)
              : `${path.path} ${percent(path.share)}`;
        const bar = h(
          "span",
          {
            class: `b${toneOfPath(path, layer)} ${path.share < 0.12 ? "thin" : path.share < 0.45 ? "short" : ""}`,
          },
          label,
        );
        bar.style.flex = `${Math.max(path.share || 0, 1e-6)} 1 0`;
        return bar;
      }),
    );
    const shares = layer.paths.map(path => `${path.path} ${percent(path.share)}`).join(", ");
    const error = worst(layer);
    return h(
      "button",
      { type: "button", class: "row", "aria-pressed": "false" },
      h("b", {}, spoken("Layer "), tail(layerName(layer)), spoken(`: ${shares}; `)),
      bars,
      h("span", { class: "num" }, amount(effective(layer)), spoken(" effective parameters")),
      h("span", { class: "num" }, error !== null && [spoken("; error "), percent(error)]),
    );
  });
  const free = layer =>
    layer.relaxed ? sum(layer.paths.filter(path => !path.group).map(path => path.share)) : -1;
  let pinned = layers.indexOf(layers.reduce((a, b) => (free(b) > free(a) ? b : a)));
  const show = index => {
    buttons.forEach((button, i) => button.setAttribute("aria-pressed", i === index));
    panel.replaceChildren(...describe(layers[index]));
  };
  buttons.forEach((button, i) => {
    button.addEventListener("click", () => {
      pinned = i;
      show(i);
    });
    button.addEventListener("focus", () => {
      pinned = i;
      show(i);
    });
    button.addEventListener("pointerenter", event => {
      if (event.pointerType === "mouse") show(i);
    });
    button.addEventListener("pointerleave", event => {
      if (event.pointerType === "mouse") show(pinned);
    });
  });
  show(pinned);
  const tones = new Map();
  layers.forEach(layer =>
    layer.paths.forEach(path => tones.set(kindOfPath(path, layer), toneOfPath(path, layer))),
  );
  return [
    h("h3", {}, layers.some(layer => layer.relaxed) ? "Symmetry of each layer" : "Layers"),
    h(
      "p",
      { class: "note" },
      "One bar per layer, from input to output, split by the share of each path in the effective parameters " +
        "(parameters that the data determine, not the prior). ",
      errors &&
        "The equivariance error is the change of the output beyond its transformation when the input is " +
          `transformed: 0${NBSP}% is exactly equivariant, about 141${NBSP}% is unrelated to the symmetry.`,
    ),
    keys([...tones]),
    h(
      "div",
      { class: "layers" },
      h(
        "div",
        {},
        h(
          "div",
          { class: "head", "aria-hidden": "true" },
          h("span", {}, "Layer"),
          h("span", {}, "Share of paths"),
          h("span", { class: "num" }, "Effective"),
          h("span", { class: "num" }, errors ? "Error" : ""),
        ),
        h(
          "ol",
          {},
          buttons.map(button => h("li", {}, button)),
        ),
      ),
      panel,
    ),
  ];
}
const tail = name => (name.length > 20 ? "..." + name.slice(-17) : name);
const spoken = text => h("span", { class: "spoken" }, text); // for screen readers only
const worst = layer => {
  const all = Object.values(layer.equivariance_error || {}).filter(known);
  return all.length ? Math.max(...all) : null;
};

function describe(layer) {
  const errors = Object.entries(layer.equivariance_error || {});
  return [
    h("h4", {}, "Layer ", layerName(layer), layer.number && h("small", {}, ` module ${layer.name}`)),
    errors.map(([group, value]) => h("p", {}, `${group} error `, h("b", {}, percent(value) || "not finite"))),
    layer.paths.map(path => {
      const values = Object.entries(path.precision || {}),
        same = new Set(values.map(([, v]) => v)).size === 1;
      const precision = !values.length
        ? [["precision", "frozen"]]
        : same
          ? [["precision", number(values[0][1])]]
          : values.map(([name, v]) => [`precision of ${name}`, number(v)]);
      const rows = [
        ["share", percent(path.share)],
        ["effective", amount(path.effective_parameters)],
        ["of parameters", number(path.parameters)],
        ...precision,
      ];
      return [
        h("h5", {}, h("i", { class: "b" + toneOfPath(path, layer) }), path.path),
        h(
          "dl",
          {},
          rows.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]),
        ),
      ];
    }),
  ].flat(2);
}

// Show the first dozen panels, and fold the others.
function foldedGrid(panels) {
  const others =
    panels.length > 12 &&
    h(
      "details",
      {},
      h("summary", {}, `All ${panels.length} layers`),
      h("div", { class: "grid" }, panels.slice(12)),
    );
  return h("div", {}, h("div", { class: "grid" }, panels.slice(0, 12)), others);
}

function overTraining(candidate) {
  const data = candidate.series;
  if (!data) return null;
  const layers = candidate.reading.layers || [],
    parts = [];
  if (data.log_evidence) {
    const curve = (name, y, tone) => ({ name, clock: data.clock, x: data.epoch, y, tone });
    parts.push(
      lineChart([curve("Fit", data.log_likelihood || [], 0), curve("Evidence", data.log_evidence, 2)], {
        label: "Evidence and fit over training",
        band: "complexity",
        caption:
          "The evidence is the fit minus the complexity (the shaded gap), " +
          "the price of the parameters that the fit determines.",
      }),
    );
  }
  const every = Object.values(data.precisions || {})
    .flatMap(Object.values)
    .flat()
    .filter(v => known(v) && v > 0);
  const small = (title, lines, options) => lineChart(lines, { ...options, small: true, title, label: title });
  const of = (values, layer) =>
    layer.paths.flatMap((path, i) => {
      const stored = values[place(layer, i)];
      if (!stored) return [];
      const columns = Array.isArray(stored) ? [[path.path, stored]] : Object.entries(stored);
      return columns.map(([name, y], dash) => ({
        name: columns.length > 1 ? name : path.path,
        x: data.epoch,
        y,
        tone: toneOfPath(path, layer),
        dash: Math.min(dash, 2),
      }));
    });
  const grid = (values, options) =>
    layers.map(layer => small(`Layer ${layerName(layer)}`, of(values, layer), options)).filter(Boolean);
  const precisions = every.length
    ? grid(data.precisions, { log: true, range: [Math.min(...every), Math.max(...every)] })
    : [];
  const effectives = grid(data.effective_parameters || {}, { zero: true });
  if (precisions.length)
    parts.push(
      h("h3", {}, "Prior precision over training"),
      h(
        "p",
        { class: "note" },
        "Prior precision of each path, on the same scale for all layers. " +
          "A high precision keeps the weights near zero, which switches the path off.",
      ),
      foldedGrid(precisions),
    );
  if (effectives.length)
    parts.push(
      h("h3", {}, "Effective parameters over training"),
      h("p", { class: "note" }, "Number of parameters of each path that the data determine."),
      foldedGrid(effectives),
    );
  return parts.length && fold("Training curves", h("h3", {}, "Fit and complexity"), ...parts);
}
