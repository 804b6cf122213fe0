// Parts of a question: learned invariances and conserved quantities.

function invariances(candidate) {
  const entries = Object.entries(candidate.reading.invariances || {})
    .map(([name, value]) => (known(value) ? { name, width: value, unit: "" } : { name, ...value }))
    .filter(row => known(row.width));
  if (!entries.length) return null;
  const arc = row => {
    const degrees = /deg|°/.test(row.unit || "")
      ? row.width
      : /rad/.test(row.unit || "")
        ? (row.width * 180) / Math.PI
        : null;
    if (degrees === null) return null;
    const a = (Math.min(degrees, 179.9) * Math.PI) / 180,
      x = 32 * Math.sin(a),
      y = -32 * Math.cos(a);
    return s(
      "svg",
      { viewBox: "-40 -40 80 80", width: 80, height: 80, "aria-hidden": "true" },
      s("circle", { r: 32, fill: "none", class: "base" }),
      s("path", {
        class: "f-kept",
        opacity: 0.8,
        d: `M0 0L${-x} ${y}A32 32 0 ${degrees > 90 ? 1 : 0} 1 ${x} ${y}Z`,
      }),
    );
  };
  const amount = row => {
    if (/factor/.test(row.unit || "")) return "up to ×" + NBSP + number(row.width);
    const sided = row.width && !/probability|share/.test(row.unit || "");
    return (sided ? "±" + NBSP : "") + number(row.width) + (row.unit ? NBSP + row.unit : "");
  };
  return [
    h("h3", {}, "Learned invariances"),
    h(
      "p",
      { class: "note" },
      "Ranges of transformations that leave labels unchanged, in both directions. A transformation that is not " +
        "listed, or a range near zero (a factor near one), means no evidence for invariance, not that the label changes.",
    ),
    h(
      "dl",
      { class: "facts" },
      entries.map(row =>
        h(
          "div",
          {},
          h("dt", {}, row.name),
          h("dd", {}, amount(row)),
          arc(row),
        ),
      ),
    ),
  ];
}

function dynamics(candidate) {
  const quantities = candidate.reading.conserved;
  if (!Array.isArray(quantities) || !quantities.length) return null;
  const columns = [
    ["p_value", "p-value"],
    ["limit", "Variation at most"],
    ["singular_value", "Singular value"],
    ["parallelness", "Parallelness"],
    ["drift", "Drift"],
  ].filter(([key]) => quantities.some(quantity => known(quantity[key])));
  const rows = quantities.map(quantity =>
    h(
      "tr",
      {},
      h("th", { scope: "row" }, quantity.name || quantity.formula),
      h("td", {}, quantity.estimate || quantity.formula),
      columns.map(([key]) => h("td", { class: "num" }, number(quantity[key]))),
    ),
  );
  return [
    h("h3", {}, "Conserved quantities"),
    h(
      "div",
      { class: "scroll", tabindex: 0, role: "group", "aria-label": "Conserved quantities" },
      h(
        "table",
        {},
        captioned(
          "Estimates with standard errors of the last digits. The p-value is the probability of a larger change along " +
            "trajectories if the quantity is conserved; the variation is the upper limit of its variance along a " +
            "trajectory, relative to its variance over all states. Drift is the change of the quantity along a trajectory.",
        ),
        h(
          "thead",
          {},
          h(
            "tr",
            {},
            h("th", { scope: "col" }, "Quantity"),
            h("th", { scope: "col" }, "Estimate"),
            columns.map(([, name]) => h("th", { scope: "col", class: "num" }, name)),
          ),
        ),
        h("tbody", {}, rows),
      ),
    ),
    h(
      "div",
      { class: "grid" },
      quantities
        .filter(quantity => Array.isArray(quantity.matrix) || quantity.flow)
        .map(quantity =>
          h(
            "div",
            {},
            h("h4", {}, quantity.name || "Generator"),
            quantity.formula && h("p", { class: "soft" }, quantity.formula),
            matrix(quantity),
            flow(quantity),
          ),
        ),
    ),
  ];
}

// Draw the error of the simulators along time, with the noise of the states.
function rollouts(data) {
  const result = data.rollouts;
  if (!result || !result.times.length) return null;
  const steps = result.times.map((_, k) => k + 1);
  const curves = Object.entries(result.errors).map(([name, y], i) => ({ name, x: steps, y, tone: i % 4 }));
  curves.push({ name: "noise of the states", x: steps, y: steps.map(() => result.noise), tone: 3, dash: 1 });
  return [
    h("h3", {}, "Rollouts"),
    lineChart(curves, {
      label: "Error of the simulators along time",
      caption:
        "Error along trajectories set aside, from their first observed state, by time step. 1 is the spread of the " +
        "states. The first state has noise, which no simulator can undo.",
    }),
    data.equations &&
      data.equations.length > 0 && [h("h4", {}, "Equations"), h("pre", { tabindex: 0 }, data.equations.join("\n"))],
  ];
}

function matrix(quantity) {
  const values = quantity.matrix;
  if (!Array.isArray(values) || !Array.isArray(values[0])) return null;
  const n = values[0].length,
    most = Math.max(...values.flat().map(Math.abs));
  if (!most) return null;
  const cells = values.flatMap((row, i) =>
    row.map((v, j) => [
      s(
        "rect",
        {
          class: v >= 0 ? "f-kept" : "f-free",
          x: 40 * j,
          y: 40 * i,
          width: 39,
          height: 39,
          opacity: (0.5 * Math.abs(v)) / most,
        },
        s("title", {}, number(v)),
      ),
      n <= 6 &&
        s("text", { x: 40 * j + 20, y: 40 * i + 24, "text-anchor": "middle", class: "strong" }, number(v, 2)),
    ]),
  );
  return s(
    "svg",
    {
      viewBox: `0 0 ${40 * n} ${40 * values.length}`,
      role: "img",
      "aria-label":
        `Generator of ${quantity.name}: ` + values.map(row => row.map(v => number(v, 2)).join(" ")).join("; "),
    },
    s("rect", { class: "base", fill: "none", width: 40 * n - 1, height: 40 * values.length - 1 }),
    cells,
  );
}

// Draw points of one curve, several curves, or arrows [x, y, dx, dy].
function flow(quantity) {
  if (!Array.isArray(quantity.flow) || !quantity.flow.length) return null;
  const arrows = !Array.isArray(quantity.flow[0][0]) && quantity.flow[0].length === 4;
  const curves = arrows
    ? quantity.flow.map(([x, y, dx, dy]) => [
        [x, y],
        [x + dx, y + dy],
      ])
    : Array.isArray(quantity.flow[0][0])
      ? quantity.flow
      : [quantity.flow];
  const points = curves.flat().filter(([x, y]) => known(x) && known(y));
  if (!points.length) return null;
  const reach = 1.22 * Math.max(1e-9, ...points.flat().map(Math.abs));
  const lines = curves.map(curve => [
    s("path", {
      class: "line s0",
      "vector-effect": "non-scaling-stroke",
      d:
        "M" +
        curve
          .filter(([x, y]) => known(x) && known(y))
          .map(([x, y]) => `${(100 * x) / reach} ${(-100 * y) / reach}`)
          .join("L"),
    }),
    s("circle", { class: "f0", r: 2, cx: (100 * curve[0][0]) / reach, cy: (-100 * curve[0][1]) / reach }),
  ]);
  return s(
    "svg",
    { viewBox: "-100 -100 200 200", role: "img", "aria-label": `Phase portrait of the flow of ${quantity.name}` },
    s("line", { class: "axis", x1: -100, x2: 100 }),
    s("line", { class: "axis", y1: -100, y2: 100 }),
    lines,
    (quantity.axes || []).map((name, i) => s("text", i ? { x: 4, y: -90 } : { x: 86, y: 12 }, name)),
  );
}
