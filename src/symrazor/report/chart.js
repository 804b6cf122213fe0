// Charts that adapt to the page width; values are read by pointer or by arrow keys.

// Return a figure that is redrawn whenever its width changes.
function figure(caption, draw) {
  const box = h("div", {});
  let width = 0;
  new ResizeObserver(() => {
    const now = Math.floor(box.clientWidth);
    if (now && now !== width) {
      width = now;
      draw(box, now);
    }
  }).observe(box);
  return h("figure", {}, box, caption && h("figcaption", {}, caption));
}

// Draw curves over training. series: [{name, x, y, tone, dash}]; options: label, log, height, band, small.
function lineChart(series, options) {
  const drawable = series
    .map(curve => {
      const points = curve.x
        .map((x, i) => [x, curve.y[i]])
        .filter(([x, y]) => known(x) && known(y) && (!options.log || y > 0));
      return { ...curve, points };
    })
    .filter(curve => curve.points.length);
  if (!drawable.length) return null;
  const readout = options.small ? null : h("p", { class: "readout", "aria-hidden": "true" });
  const result = figure(options.caption, (box, width) => {
    const old = box.querySelector("svg"),
      active = old && old === document.activeElement;
    const legend =
      !options.small && width < 560 && drawable.length > 1 && keys(drawable.map(curve => [curve.name, curve.tone]));
    box.replaceChildren(...[legend, drawLines(drawable, options, width, readout), readout].filter(Boolean));
    if (active) box.querySelector("svg").focus();
  });
  if (options.small) result.prepend(h("h4", {}, options.title));
  return result;
}
const keys = pairs =>
  h(
    "ul",
    { class: "keys" },
    pairs.map(([name, tone]) => h("li", {}, h("i", { class: "b" + tone }), name)),
  );

function drawLines(series, options, width, readout) {
  const height = options.small ? 108 : Math.max(200, Math.min(300, width * 0.42));
  const labelled = !options.small && width >= 560;
  const left = 52,
    right = labelled ? 12 + 7.2 * Math.max(...series.map(curve => Math.min(curve.name.length, 24))) : 8,
    top = 10,
    bottom = options.small ? 20 : 34;
  const all = series.flatMap(curve => curve.points);
  const xs = all.map(p => p[0]),
    ys = all.map(p => p[1]);
  const [x0, x1] = [Math.min(...xs), Math.max(...xs)];
  let [y0, y1] = options.range || [Math.min(...ys), Math.max(...ys)];
  if (options.zero) y0 = Math.min(0, y0);
  const f = options.log ? Math.log : v => v;
  if (y0 === y1) {
    if (options.log) {
      y0 /= 2;
      y1 *= 2;
    } else {
      y0 -= Math.abs(y0) * 0.1 || 1;
      y1 += Math.abs(y1) * 0.1 || 1;
    }
  }
  const X = v => left + (width - left - right) * (x1 > x0 ? (v - x0) / (x1 - x0) : 0.5);
  const Y = v => top + ((height - top - bottom) * (f(y1) - f(v))) / (f(y1) - f(y0));
  const marks = options.log ? logTicks(y0, y1) : ticks(y0, y1, options.small ? 2 : 4);
  const grid = marks.map(v => [
    s("line", { class: "axis", x1: left, x2: width - right, y1: Y(v), y2: Y(v) }),
    s("text", { x: left - 8, y: Y(v) + 4, "text-anchor": "end" }, number(v, 2)),
  ]);
  const epochs = options.small
    ? [x0, x1]
    : ticks(x0, x1, Math.max(2, Math.floor(width / (x1 < 1000 ? 90 : 120)))).filter(Number.isInteger);
  const axis = epochs.map(v =>
    s(
      "text",
      { x: X(v), y: height - bottom + 16, "text-anchor": v === x0 ? "start" : v === x1 ? "end" : "middle" },
      number(v),
    ),
  );
  const path = points => "M" + points.map(([x, y]) => X(x).toFixed(1) + " " + Y(y).toFixed(1)).join("L");
  const lines = series.map(curve =>
    curve.points.length > 1
      ? s("path", { class: `line s${curve.tone} ${curve.dash ? "dash" + curve.dash : ""}`, d: path(curve.points) })
      : s("circle", { class: "f" + curve.tone, r: 3, cx: X(curve.points[0][0]), cy: Y(curve.points[0][1]) }),
  );
  const band =
    options.band &&
    series.length > 1 &&
    s("path", {
      class: "area f" + series[1].tone,
      d: path(series[0].points) + "L" + path([...series[1].points].reverse()).slice(1) + "Z",
    });
  const [upper, lower] = series.map(curve => curve.points.length);
  const middle = Math.floor(lower / 2);
  const gap =
    band &&
    lower > 2 &&
    upper === lower &&
    s(
      "text",
      {
        x: X(series[1].points[middle][0]),
        y: (Y(series[0].points[middle][1]) + Y(series[1].points[middle][1])) / 2 + 4,
        "text-anchor": "middle",
        class: "strong",
      },
      options.band,
    );
  const names = labelled ? endLabels(series, Y, width - right + 8) : [];
  const cursor = s("g", {});
  const first = series
    .map(curve => `${curve.name} from ${number(curve.points[0][1])} to ${number(curve.points.at(-1)[1])}`)
    .join("; ");
  const svg = s(
    "svg",
    {
      viewBox: `0 0 ${width} ${height}`,
      height,
      role: options.small ? "img" : "slider",
      "aria-label": `${options.label}: ${first}`,
    },
    grid,
    axis,
    !options.small && s("text", { x: width - right, y: height - 2, "text-anchor": "end" }, clockOf(series)),
    band,
    gap,
    lines,
    names,
    cursor,
  );
  if (!options.small) reader(svg, series, { X, Y, top, bottom: height - bottom, width }, cursor, readout);
  return svg;
}

const clockOf = series => series[0].clock || "epoch";

// Place names at the ends of their curves, far enough apart to be readable.
function endLabels(series, Y, x) {
  const ends = series.map(curve => ({ curve, y: Y(curve.points.at(-1)[1]) })).sort((a, b) => a.y - b.y);
  ends.forEach((end, i) => {
    if (i) end.y = Math.max(end.y, ends[i - 1].y + 15);
  });
  const height = (first, last) => Y(last.curve.points.at(-1)[1]) - Y(first.curve.points.at(-1)[1]);
  const [first, last] = [ends[0], ends.at(-1)];
  const over = ends.length ? Math.max(0, (last.y - first.y - height(first, last)) / 2) : 0;
  return ends.map(({ curve, y }) =>
    s(
      "text",
      { x, y: y - over + 4, class: `name f${curve.tone}` },
      curve.name.length > 24 ? curve.name.slice(0, 22) + "..." : curve.name,
    ),
  );
}

// Show the values at the pointer, or at the position chosen by arrow keys.
function reader(svg, series, frame, cursor, readout) {
  const epochs = [...new Set(series.flatMap(curve => curve.points.map(p => p[0])))].sort((a, b) => a - b);
  const clock = clockOf(series);
  let at = epochs.length - 1;
  const show = index => {
    at = Math.max(0, Math.min(epochs.length - 1, index));
    const epoch = epochs[at];
    const here = series.map(curve => [curve, curve.points.find(p => p[0] === epoch)]).filter(([, p]) => p);
    const text =
      `${clock[0].toUpperCase()}${clock.slice(1)} ${epoch}: ` +
      here.map(([curve, p]) => `${curve.name} ${number(p[1], 4)}`).join(", ");
    svg.setAttribute("aria-valuenow", epoch);
    svg.setAttribute("aria-valuetext", text);
    readout.textContent = text;
    cursor.replaceChildren(
      s("line", { class: "cursor", x1: frame.X(epoch), x2: frame.X(epoch), y1: frame.top, y2: frame.bottom }),
      ...here.map(([curve, p]) =>
        s("circle", { class: "f" + curve.tone, cx: frame.X(epoch), cy: frame.Y(p[1]), r: 4 }),
      ),
    );
  };
  make(
    svg,
    { tabindex: 0, "aria-valuemin": epochs[0], "aria-valuemax": epochs.at(-1), "aria-valuenow": epochs[at] },
    [],
  );
  show(at);
  cursor.replaceChildren();
  svg.addEventListener("pointermove", event => {
    const x = event.clientX - svg.getBoundingClientRect().left;
    const apart = epochs.map(epoch => Math.abs(frame.X(epoch) - x));
    show(apart.indexOf(Math.min(...apart)));
  });
  svg.addEventListener("focus", () => show(at));
  svg.addEventListener("keydown", event => {
    const to = {
      ArrowLeft: at - 1,
      ArrowDown: at - 1,
      ArrowRight: at + 1,
      ArrowUp: at + 1,
      Home: 0,
      End: epochs.length - 1,
    }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    show(to);
  });
}
