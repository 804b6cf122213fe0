// A question: what leaves the answer alone, and what is conserved.

function invariances(candidate) {
  const held = Object.entries(candidate.reading.invariances || {})
    .map(([name, value]) => (known(value) ? { name, width: value, unit: "" } : { name, ...value }))
    .filter(row => known(row.width));
  if (!held.length) return null;
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
    h("h3", {}, "What leaves the answer alone"),
    h(
      "p",
      { class: "note" },
      "Widths of the learned distribution of transformations, to both sides. " +
        "Near zero, a factor near one, means that the transformation changes the answer.",
    ),
    h(
      "dl",
      { class: "facts" },
      held.map(row =>
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
  const held = candidate.reading.conserved;
  if (!Array.isArray(held) || !held.length) return null;
  const largest = Math.max(...held.map(one => one.singular_value || 0)) || 1;
  const rows = held.map(one => {
    const meter = h("span", { class: "meter b1" });
    meter.style.width = `${(100 * (one.singular_value || 0)) / largest}%`;
    return h(
      "tr",
      {},
      h("th", { scope: "row" }, one.name),
      h("td", { class: "bars" }, meter),
      [one.singular_value, one.parallelness, one.drift].map(v => h("td", { class: "num" }, number(v))),
    );
  });
  return [
    h("h3", {}, "What is conserved"),
    h(
      "div",
      { class: "scroll", tabindex: 0, role: "group", "aria-label": "Conserved quantities" },
      h(
        "table",
        {},
        captioned(
          "Learned generators by their singular values. Parallelness is how much of one lies in the space " +
            "of known symmetries; drift is how far the quantity moves along a trajectory.",
        ),
        h(
          "thead",
          {},
          h(
            "tr",
            {},
            h("th", { scope: "col" }, "Quantity"),
            h("td", {}),
            ["Singular value", "Parallelness", "Drift"].map(name =>
              h("th", { scope: "col", class: "num" }, name),
            ),
          ),
        ),
        h("tbody", {}, rows),
      ),
    ),
    h(
      "div",
      { class: "grid" },
      held
        .filter(one => Array.isArray(one.matrix) || one.flow)
        .map(one =>
          h(
            "div",
            {},
            h("h4", {}, one.name),
            one.formula && h("p", { class: "soft" }, one.formula),
            matrix(one),
            flow(one),
          ),
        ),
    ),
  ];
}

function matrix(one) {
  const values = one.matrix;
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
        `Generator of ${one.name}: ` + values.map(row => row.map(v => number(v, 2)).join(" ")).join("; "),
    },
    s("rect", { class: "base", fill: "none", width: 40 * n - 1, height: 40 * values.length - 1 }),
    cells,
  );
}

// Points of one curve, several curves, or arrows [x, y, dx, dy].
function flow(one) {
  if (!Array.isArray(one.flow) || !one.flow.length) return null;
  const arrows = !Array.isArray(one.flow[0][0]) && one.flow[0].length === 4;
  const curves = arrows
    ? one.flow.map(([x, y, dx, dy]) => [
        [x, y],
        [x + dx, y + dy],
      ])
    : Array.isArray(one.flow[0][0])
      ? one.flow
      : [one.flow];
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
    { viewBox: "-100 -100 200 200", role: "img", "aria-label": `Phase portrait of the flow of ${one.name}` },
    s("line", { class: "axis", x1: -100, x2: 100 }),
    s("line", { class: "axis", y1: -100, y2: 100 }),
    lines,
    (one.axes || []).map((name, i) => s("text", i ? { x: 4, y: -90 } : { x: 86, y: 12 }, name)),
  );
}
