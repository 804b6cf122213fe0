// The top of a question with an answer: numbers, the moved examples, errors and candidates.

function answer(data) {
  if (!data.summary) return null;
  return tags([
    keyNumbers(data),
    moved(data),
    errors(data),
    candidates(data),
    untested(data),
    recommendedCode(data),
  ]);
}

// Code that puts the answer into a network of the reader's own.
function recommendedCode(data) {
  return data.code && [h("h3", {}, "In your own network"), h("pre", { tabindex: 0 }, data.code)];
}

// The three numbers that matter: how sure, how good, and what the choice of the network gains.
function keyNumbers(data) {
  const claim = (data.claims || [])[0],
    used = data.final || data.candidates.find(c => c.name === data.chosen) || data.candidates[0],
    test = used.reading.test || {};
  const bound = claim && Math.min(0.99, Math.floor(100 * claim.probability) / 100);
  const chance = claim && (claim.probability >= 0.99 ? "> 99" : String(Math.round(100 * bound))) + NBSP + "%";
  const rows = [
    claim && [
      claim.holds === null ? "Undecided; more probable answer" : "Probability of this answer",
      chance,
      `${number(claim.starts)} starts of each network`,
    ],
    known(test.accuracy) && [
      "Correct on held-out data",
      percentExact(test.accuracy),
      known(test.ece) ? `calibration error ${number(test.ece, 2)}` : null,
    ],
    known(test.mse) && [
      "Explained on held-out data",
      percentExact(Math.max(0, 1 - test.mse)),
      "share of the variance of the target",
    ],
    claim && [
      "Evidence against the symmetry",
      `${signed(claim.evidence.mean)}${NBSP}nats`,
      `± ${number(claim.evidence.standard_error)}, for the rival “${claim.rival}”`,
    ],
  ].filter(Boolean);
  return h(
    "dl",
    { class: "facts key" },
    rows.map(([name, value, more]) =>
      h("div", {}, h("dt", {}, name), h("dd", {}, value, more && h("small", {}, more))),
    ),
  );
}

// Examples that are shifted, with the output for each: it stays where the network is invariant.
function moved(data) {
  const part = data.moved;
  if (!part || !Array.isArray(part.examples) || !part.examples.length) return null;
  const classes = Array.isArray(data.classes);
  const all = part.examples.flatMap(e => e.values);
  const [low, high] = classes ? [0, 1] : [Math.min(...all), Math.max(...all)];
  const share = v => (high > low ? (v - low) / (high - low) : 1);
  const rows = part.examples.map(example => {
    const middle = (example.values.length - 1) / 2;
    return h(
      "li",
      { class: "moved" },
      h(
        "p",
        { class: "note" },
        example.label !== undefined && `An example of “${example.label}”. `,
        classes ? `Probability of “${example.output}”:` : `Predicted ${example.output}:`,
      ),
      h(
        "ol",
        { class: "strip" },
        example.values.map((value, i) => {
          const bar = h("span", { class: "meter " + (i === middle ? "b0" : "b1") });
          bar.style.width = `${100 * Math.max(0.02, share(value))}%`;
          const changed = classes && example.predicted[i] !== example.output;
          return h(
            "li",
            { class: i === middle ? "own" : null },
            example.images
              ? image(example.images[i], `shifted by ${part.steps[i]}`)
              : example.lines && trace(example.lines[i], `shifted by ${part.steps[i]}`),
            h("span", { class: "track" }, bar),
            h("b", {}, classes ? percent(value) || "0 %" : number(value)),
            h(
              "small",
              {},
              part.steps[i] ? signed(part.steps[i]) : "not shifted",
              changed && h("em", {}, ` “${example.predicted[i]}”`),
            ),
          );
        }),
      ),
    );
  });
  return [
    h("h3", {}, "Your examples, moved"),
    h(
      "p",
      { class: "note" },
      `Each example is shifted, around the border, by the number of ${part.unit} below it, and the delivered network predicts it again. `,
      "Equal bars: the output does not follow the shift.",
    ),
    h("ul", { class: "plain" }, rows),
  ];
}

function trace(values, text) {
  const low = Math.min(...values),
    range = Math.max(...values) - low || 1;
  const points = values.map((v, i) => `${i},${(1 - (v - low) / range) * 100}`).join(" ");
  return s(
    "svg",
    {
      viewBox: `0 -4 ${values.length - 1} 108`,
      preserveAspectRatio: "none",
      role: "img",
      "aria-label": text,
      class: "trace",
    },
    s("polyline", { points, class: "line s0", "vector-effect": "non-scaling-stroke" }),
  );
}

function errors(data) {
  return [confusion(data), scatter(data), worstExamples(data)];
}

function confusion(data) {
  const counts = data.confusion,
    names = data.classes;
  if (!Array.isArray(counts) || !Array.isArray(names) || counts.length !== names.length) return null;
  const most = Math.max(1, ...counts.flat());
  const cell = (count, i, k) => {
    const node = h("td", { class: i === k ? "right" : "wrong" }, count || "");
    node.style.setProperty("--share", String(Math.sqrt(count / most)));
    return node;
  };
  return [
    h("h3", {}, "Which classes are confused"),
    h("p", { class: "note" }, `Rows: label. Columns: prediction. Numbers of samples of the ${data.shown_on}.`),
    h(
      "div",
      { class: "scroll", tabindex: 0, role: "group", "aria-label": "Confusion matrix" },
      h(
        "table",
        { class: "confusion" },
        h("caption", { class: "spoken" }, "Confusion matrix"),
        h(
          "thead",
          {},
          h(
            "tr",
            {},
            h("td", { class: "corner" }),
            names.map(name => h("th", { scope: "col" }, name)),
          ),
        ),
        h(
          "tbody",
          {},
          counts.map((row, i) =>
            h(
              "tr",
              {},
              h("th", { scope: "row" }, names[i]),
              row.map((count, k) => cell(count, i, k)),
            ),
          ),
        ),
      ),
    ),
  ];
}

function worstExamples(data) {
  const part = data.worst;
  if (!part || !(part.images || part.lines)) return null;
  return [
    h("h3", {}, "Worst examples"),
    h("p", { class: "note" }, `Samples of the ${data.shown_on} whose label has the lowest probability.`),
    h(
      "ul",
      { class: "images worst" },
      part.labels.map((label, i) =>
        h(
          "li",
          {},
          part.images ? image(part.images[i], `label ${label}`) : trace(part.lines[i], `label ${label}`),
          h("span", {}, `“${label}”: ${percent(part.probability[i]) || "0 %"}`),
          h("span", { class: "soft" }, `predicted “${part.predicted[i]}”`),
        ),
      ),
    ),
  ];
}

function scatter(data) {
  const part = data.scatter;
  if (!part || !Array.isArray(part.true) || !part.true.length) return null;
  const all = [...part.true, ...part.predicted];
  const low = Math.min(...all),
    range = Math.max(...all) - low || 1;
  const draw = (box, width) => {
    const side = Math.min(width, 420),
      left = 56,
      plot = side - left - 12;
    const X = v => left + (plot * (v - low)) / range,
      Y = v => 10 + plot * (1 - (v - low) / range);
    const marks = ticks(low, low + range, 4);
    const svg = s(
      "svg",
      { viewBox: `0 0 ${side} ${side}`, role: "img", "aria-label": "Predicted against true targets" },
      marks.map(v => [
        s("line", { class: "axis", x1: left, x2: left + plot, y1: Y(v), y2: Y(v) }),
        s("text", { x: left - 8, y: Y(v) + 4, "text-anchor": "end" }, number(v)),
        s("text", { x: X(v), y: plot + 28, "text-anchor": "middle" }, number(v)),
      ]),
      s("line", { class: "base dash1", x1: X(low), y1: Y(low), x2: X(low + range), y2: Y(low + range) }),
      part.true.map((value, i) => [
        part.std &&
          s("line", {
            class: "line s0 thinline",
            x1: X(value),
            x2: X(value),
            y1: Y(part.predicted[i] - part.std[i]),
            y2: Y(part.predicted[i] + part.std[i]),
          }),
        s("circle", { class: "f0", cx: X(value), cy: Y(part.predicted[i]), r: 2.5 }),
      ]),
      s("text", { x: left + plot, y: side - 2, "text-anchor": "end" }, "true"),
    );
    svg.style.maxWidth = `${side}px`;
    box.replaceChildren(svg);
  };
  return [
    h("h3", {}, "Predicted against true targets"),
    beside(
      `The ${data.shown_on}. Lines: one standard deviation, noise included. A perfect network lies on the dashed line.`,
      draw,
    ),
  ];
}

// Every network that was compared: evidence with its spread over starts, and two scores.
function candidates(data) {
  const all = trained(data);
  const score = ["accuracy", "mse", "nll"].find(key => all.some(c => known((c.reading.test || {})[key])));
  const shown = v => (score === "accuracy" ? (known(v) ? percentExact(v) : "") : number(v));
  const left = data.candidates.some(c => c.left_out);
  const rows = all.map(c => {
    const isFinal = c === data.final,
      chosen = c.name === data.chosen;
    return h(
      "tr",
      { class: chosen ? "chosen" : null },
      h("th", { scope: "row" }, isFinal ? "delivered network" : c.name, chosen && h("small", {}, " recommended")),
      h(
        "td",
        { class: "num" },
        !isFinal && number(c.log_evidence),
        !isFinal && known(c.spread) && h("small", {}, ` ± ${number(c.spread)}`),
      ),
      left && h("td", { class: "num" }, !isFinal && c.left_out && number(c.left_out.log_likelihood / c.left_out.n)),
      score && h("td", { class: "num" }, shown((c.reading.test || {})[score])),
    );
  });
  const heads = ["Network", "Log evidence", left && "Left-out data", score && `Held-out ${score}`].filter(Boolean);
  return [
    h("h3", {}, "The networks that were compared"),
    h(
      "table",
      { class: "candidates" },
      captioned(
        "Log evidence in nats: mean over starts and its spread. Left-out data: log likelihood per sample of training data that a start " +
          "left out. Higher is better.",
      ),
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          heads.map((name, i) => h("th", { scope: "col", class: i ? "num" : null }, name)),
        ),
      ),
      h("tbody", {}, rows),
    ),
  ];
}

function untested(data) {
  const sentences = (data.not_tested || []).filter(Boolean);
  return (
    sentences.length > 0 && [
      h("h3", {}, "What was not tested"),
      h(
        "ul",
        {},
        sentences.map(text => h("li", {}, text.replaceAll("`", ""))),
      ),
    ]
  );
}
