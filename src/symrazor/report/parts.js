// Parts of a question: filters, examples, calibration and cost.

const pathName = (question, name) => {
  const match = /^(.*?)\.?paths\.(\d+)$/.exec(name);
  const layer = numbered(question, match ? match[1] : name);
  return match ? `Layer ${layer}, path ${Number(match[2]) + 1}` : `Layer ${layer}`;
};
const image = (source, text) => h("img", { src: source, alt: text });
function filters(question) {
  const layers = Object.entries(question.filters || {});
  const anchors = Object.entries(question.anchors || {}).filter(
    ([, a]) => Array.isArray(a.points) && Array.isArray(a.shape),
  );
  if (!layers.length && !anchors.length) return null;
  return fold(
    "Learned filters",
    h("h3", {}, "Learned filters"),
    layers.length > 0 &&
      h(
        "p",
        { class: "note" },
        ofNetwork(question),
        "Positive weights are green, negative weights red. Opacity is the magnitude, relative to the layer.",
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
  );
}

function examples(question) {
  const data = question.examples || {},
    labels = data.labels || [],
    images = data.images || [];
  const label = i => (labels[i] === undefined ? `example ${i + 1}` : labels[i]);
  const nodes = [];
  if (data.transformed) {
    nodes.push(
      h("h3", {}, "Transformed examples"),
      h(
        "p",
        { class: "note" },
        "An example, followed by draws from the learned distribution of transformations, to which the network is invariant.",
      ),
      data.transformed.map((orbit, i) =>
        h(
          "div",
          { class: "orbit" },
          images[i] && image(images[i], `${label(i)}, original`),
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
    nodes.push(
      h("h3", {}, "Examples"),
      h(
        "ul",
        { class: "images" },
        images.map((source, i) =>
          h("li", {}, image(source, `example ${i + 1}`), h("span", { title: labels[i] }, labels[i])),
        ),
      ),
    );
  if (data.lines)
    nodes.push(
      h("h3", {}, "Examples"),
      h(
        "div",
        { class: "grid" },
        data.lines.map((y, i) =>
          lineChart([{ name: label(i), x: y.map((_, t) => t), y, tone: 0 }], {
            small: true,
            title: label(i),
            label: label(i),
          }),
        ),
      ),
    );
  return nodes.length > 0 && fold("Examples", ...nodes);
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
        s("title", {}, `confidence ${percent(p)}, accuracy ${percent(c.accuracy[i])}, ${number(c.count[i])} data`),
      ),
    ]);
    const values = c.confidence
      .map((p, i) => `confidence ${percent(p)}, accuracy ${percent(c.accuracy[i])}`)
      .join("; ");
    const svg = s(
      "svg",
      { viewBox: `0 0 ${side} ${side + 12}`, role: "img", "aria-label": `Reliability: ${values}` },
      grid,
      s("line", { class: "base dash1", x1: X(0), y1: Y(0), x2: X(1), y2: Y(1) }),
      dots,
      s("text", { x: left + plot, y: foot + 34, "text-anchor": "end" }, "confidence"),
      s("text", { x: left + 4, y: 8 }, "accuracy"),
    );
    svg.style.maxWidth = `${side}px`;
    box.replaceChildren(svg);
  };
  return fold(
    "Calibration",
    h("h3", {}, "Calibration"),
    beside(
      `Confidence and accuracy of the network${c.network ? ` “${c.network}”` : ""} on ${number(total)} ${c.on || "data"}. ` +
        "A calibrated network lies on the dashed line; larger dots stand for more data.",
      draw,
    ),
  );
}

function beside(caption, draw) {
  const node = figure(caption, draw);
  node.className = "beside";
  return node;
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
  const nodes = [h("h3", {}, "Cost")];
  if (typeof c === "string") nodes.push(h("pre", {}, c));
  else if (c && c.refused)
    nodes.push(h("p", { class: "note" }, `The network was not collapsed: ${c.refused}`));
  else if (c) {
    const totals = [
      ["Parameters", c.parameters],
      ["Operations per input", c.flops],
      [`Milliseconds for ${number(c.data)} inputs`, c.latency_ms],
    ].filter(([, pair]) => pair);
    const dropped = (c.layers || []).flatMap(layer =>
      layer.paths
        .filter(path => path.fate === "dropped")
        .map(path => `${path.path} of layer ${numbered(question, layer.name)}`),
    );
    nodes.push(
      h(
        "p",
        { class: "note" },
        ofNetwork(question),
        "Collapsed to a plain network. ",
        dropped.length ? `Dropped paths: ${dropped.join(", ")}.` : "No path was dropped.",
        c.change ? ` Relative change of the outputs: ${number(c.change.rms, 2)}.` : "",
      ),
      wrap(
        "Cost before and after",
        h(
          "table",
          {},
          captioned("Whole network before and after collapsing"),
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
  const after = layers.some(entry => known(entry.flops_after));
  if (layers.length)
    nodes.push(
      wrap(
        "Cost of each layer",
        h(
          "table",
          {},
          captioned("Parameters and operations per input of each layer"),
          heads(["Layer", "Parameters", after && "After", "Operations", after && "After"].filter(Boolean)),
          h(
            "tbody",
            {},
            layers.map(entry =>
              row(
                `${numbered(question, entry.layer)} ${entry.type || ""}`,
                after
                  ? [
                      number(entry.parameters),
                      number(entry.parameters_after),
                      number(entry.flops),
                      number(entry.flops_after),
                    ]
                  : [number(entry.parameters), number(entry.flops)],
              ),
            ),
          ),
        ),
      ),
    );
  return fold("Cost", ...nodes);
}
