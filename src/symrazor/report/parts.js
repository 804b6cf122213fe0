// A question: filters, examples, calibration, costs.

const pathName = (question, name) => {
  const found = /^(.*?)\.?paths\.(\d+)$/.exec(name);
  const layer = numbered(question, found ? found[1] : name);
  return found ? `Layer ${layer}, path ${Number(found[2]) + 1}` : `Layer ${layer}`;
};
const image = (source, text) => h("img", { src: source, alt: text });
function filters(question) {
  const layers = Object.entries(question.filters || {});
  const anchors = Object.entries(question.anchors || {}).filter(
    ([, a]) => Array.isArray(a.points) && Array.isArray(a.shape),
  );
  if (!layers.length && !anchors.length) return null;
  return [
    h("h3", {}, "Learned filters"),
    layers.length > 0 &&
      h(
        "p",
        { class: "note" },
        ofNetwork(question),
        "Positive weights in green, negative in red; strength is the opacity, by layer.",
      ),
    h(
      "div",
      { class: "grid wide" },
      layers.map(([name, all]) =>
        h(
          "div",
          {},
          h("h4", {}, pathName(question, name)),
          h(
            "ul",
            { class: "images filters" },
            all.map((source, i) => h("li", {}, image(source, `filter ${i + 1} of ${pathName(question, name)}`))),
          ),
        ),
      ),
    ),
    anchors.length > 0 && h("h3", {}, "Anchors"),
    h(
      "div",
      { class: "grid" },
      anchors.map(([name, a]) => {
        const [rows, columns] = a.shape;
        const dots = a.points.map(([y, x]) =>
          s("circle", { class: "f0", cx: x, cy: y, r: Math.max(rows, columns) / 40 }),
        );
        return h(
          "div",
          {},
          h("h4", {}, name),
          s(
            "svg",
            {
              viewBox: `${-columns / 2} ${-rows / 2} ${columns} ${rows}`,
              role: "img",
              "aria-label": `${a.points.length} anchors on a map of ${rows} by ${columns}`,
            },
            s("rect", {
              x: -columns / 2,
              y: -rows / 2,
              width: columns,
              height: rows,
              fill: "none",
              class: "base",
              "vector-effect": "non-scaling-stroke",
            }),
            dots,
          ),
        );
      }),
    ),
  ];
}

function examples(question) {
  const held = question.examples || {},
    labels = held.labels || [],
    images = held.images || [];
  const label = i => (labels[i] === undefined ? `example ${i + 1}` : labels[i]);
  const found = [];
  if (held.transformed) {
    found.push(
      h("h3", {}, "Orbits"),
      h(
        "p",
        { class: "note" },
        "An example and draws from the learned distribution of its transformations: to the network they are the same.",
      ),
      held.transformed.map((orbit, i) =>
        h(
          "div",
          { class: "orbit" },
          images[i] && image(images[i], `${label(i)}, as it is`),
          h(
            "ul",
            { class: "images" },
            orbit.map((source, k) => h("li", {}, image(source, `${label(i)}, draw ${k + 1}`))),
          ),
        ),
      ),
    );
  }
  if (images.length)
    found.push(
      h("h3", {}, "Examples"),
      h(
        "ul",
        { class: "images" },
        images.map((source, i) =>
          h("li", {}, image(source, `example ${i + 1}`), h("span", { title: labels[i] }, labels[i])),
        ),
      ),
    );
  if (held.lines)
    found.push(
      h("h3", {}, "Examples"),
      h(
        "div",
        { class: "grid" },
        held.lines.map((y, i) =>
          lineChart([{ name: label(i), x: y.map((_, t) => t), y, tone: 0 }], {
            small: true,
            title: label(i),
            label: label(i),
          }),
        ),
      ),
    );
  return found;
}

function calibration(question) {
  const c = question.calibration;
  if (!c || !Array.isArray(c.confidence) || !c.confidence.length) return null;
  const total = sum(c.count),
    most = Math.max(...c.count);
  const draw = (box, width) => {
    const side = Math.min(width, 420),
      left = 44,
      plot = side - left - 12,
      foot = plot + 10;
    const X = v => left + plot * v,
      Y = v => 10 + plot * (1 - v);
    const grid = [0, 0.5, 1].map(v => [
      s("line", { class: "axis", x1: left, x2: left + plot, y1: Y(v), y2: Y(v) }),
      s("text", { x: left - 8, y: Y(v) + 4, "text-anchor": "end" }, percent(v) || "0 %"),
      s("text", { x: X(v), y: foot + 18, "text-anchor": "middle" }, percent(v) || "0 %"),
    ]);
    const dots = c.confidence.map((p, i) => [
      s("line", { class: "line s0", x1: X(p), x2: X(p), y1: Y(p), y2: Y(c.accuracy[i]) }),
      s(
        "circle",
        { class: "f0", cx: X(p), cy: Y(c.accuracy[i]), r: 3 + 7 * Math.sqrt(c.count[i] / most) },
        s("title", {}, `says ${percent(p)}, right ${percent(c.accuracy[i])}, ${number(c.count[i])} data`),
      ),
    ]);
    const said = c.confidence.map((p, i) => `says ${percent(p)}, right ${percent(c.accuracy[i])}`).join("; ");
    const svg = s(
      "svg",
      { viewBox: `0 0 ${side} ${side + 12}`, role: "img", "aria-label": `Reliability: ${said}` },
      grid,
      s("line", { class: "base dash1", x1: X(0), y1: Y(0), x2: X(1), y2: Y(1) }),
      dots,
      s("text", { x: left + plot, y: foot + 34, "text-anchor": "end" }, "confidence"),
      s("text", { x: left + 4, y: 8 }, "accuracy"),
    );
    svg.style.maxWidth = `${side}px`;
    box.replaceChildren(svg);
  };
  return [
    h("h3", {}, "Calibration"),
    beside(
      `How sure the network${c.network ? ` “${c.network}”` : ""} is, and how often it is right, over ${number(total)} ${c.on || "data"}. ` +
        "On the dashed line it knows what it knows; larger dots stand for more data.",
      draw,
    ),
  ];
}

function beside(caption, draw) {
  const found = figure(caption, draw);
  found.className = "beside";
  return found;
}

function cost(question) {
  const c = question.collapse,
    layers = Array.isArray(question.costs) ? question.costs : [];
  if (!c && !layers.length) return null;
  const saved = (before, after) =>
    known(before) && known(after) && before ? signed((100 * (after - before)) / before) + NBSP + "%" : "";
  const heads = names =>
    h(
      "thead",
      {},
      h(
        "tr",
        {},
        names.map((name, i) => h("th", { scope: "col", class: i ? "num" : null }, name)),
      ),
    );
  const row = (name, cells) =>
    h(
      "tr",
      {},
      h("th", { scope: "row" }, name),
      cells.map(text => h("td", { class: "num" }, text)),
    );
  const wrap = (label, table) =>
    h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": label }, table);
  const found = [h("h3", {}, "What it costs")];
  if (typeof c === "string") found.push(h("pre", {}, c));
  else if (c && c.refused)
    found.push(h("p", { class: "note" }, `The network was not collapsed: ${c.refused}`));
  else if (c) {
    const totals = [
      ["Parameters", c.parameters],
      ["Operations per datum", c.flops],
      [`Milliseconds for ${number(c.data)} data`, c.latency_ms],
    ].filter(([, pair]) => pair);
    const fates = (c.layers || []).flatMap(layer =>
      layer.paths
        .filter(path => path.fate === "dropped")
        .map(path => `${path.path} of layer ${numbered(question, layer.name)}`),
    );
    found.push(
      h(
        "p",
        { class: "note" },
        ofNetwork(question),
        fates.length
          ? `Collapsed to a plain network, without ${fates.join(", ")}.`
          : "Collapsed to a plain network: no path was dropped.",
        c.change ? ` Outputs change by ${number(c.change.rms, 2)} of their size.` : "",
      ),
      wrap(
        "Cost before and after",
        h(
          "table",
          {},
          captioned("The whole network, before and after"),
          heads(["Cost", "Before", "After", "Change"]),
          h(
            "tbody",
            {},
            totals.map(([name, pair]) =>
              row(name, [number(pair.before), number(pair.after), saved(pair.before, pair.after)]),
            ),
          ),
        ),
      ),
    );
  }
  const after = layers.some(one => known(one.flops_after));
  if (layers.length)
    found.push(
      wrap(
        "Cost of each layer",
        h(
          "table",
          {},
          captioned("Each layer: parameters, and operations per datum"),
          heads(["Layer", "Parameters", after && "After", "Operations", after && "After"].filter(Boolean)),
          h(
            "tbody",
            {},
            layers.map(one =>
              row(
                `${numbered(question, one.layer)} ${one.type || ""}`,
                after
                  ? [
                      number(one.parameters),
                      number(one.parameters_after),
                      number(one.flops),
                      number(one.flops_after),
                    ]
                  : [number(one.parameters), number(one.flops)],
              ),
            ),
          ),
        ),
      ),
    );
  return found;
}
