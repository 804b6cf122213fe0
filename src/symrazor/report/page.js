// The page: the questions with their candidates, then the sections they share.

const DOCUMENT = JSON.parse(document.getElementById("document").textContent);
const tags = nodes => [nodes].flat(Infinity).filter(node => node instanceof Node);

function question(data, index) {
  const parts = document.querySelector(`#q${index} .parts`);
  const compared = data.candidates.find(c => c.name === "relaxed") || data.candidates[0];
  const subject = data.final && data.final.of === compared.name ? data.final : compared;
  const details = [comparison(data), networks(data, index, subject)];
  parts.append(
    ...tags([
      answer(data) || [facts(data, subject), details],
      rollouts(data),
      data.summary && fold("Layers and training", facts(data, subject), details),
      filters(data),
      examples(data),
      calibration(data),
      cost(data),
    ]),
  );
}

// Return the candidates, and the one that was trained for longer.
const trained = data => [...data.candidates, ...(data.final ? [data.final] : [])];

// Show one network at a time in tabs, with arrow keys between them.
function networks(data, index, subject) {
  const render = candidate =>
    tags([picture(candidate), invariances(candidate), dynamics(candidate), overTraining(candidate)]);
  const all = trained(data);
  if (all.length < 2) return render(all[0]);
  const panel = h("div", { role: "tabpanel", id: `q${index}-panel`, tabindex: 0 });
  const tabs = all.map((candidate, i) =>
    h(
      "button",
      { type: "button", role: "tab", id: `q${index}-tab${i}`, "aria-controls": panel.id },
      candidate.name,
    ),
  );
  const choose = (i, focus) => {
    tabs.forEach((tab, k) => {
      tab.setAttribute("aria-selected", k === i);
      tab.tabIndex = k === i ? 0 : -1;
    });
    panel.setAttribute("aria-labelledby", tabs[i].id);
    panel.replaceChildren(...render(all[i]));
    if (focus) tabs[i].focus();
  };
  tabs.forEach((tab, i) => {
    tab.addEventListener("click", () => choose(i));
    tab.addEventListener("keydown", event => {
      const to = { ArrowRight: i + 1, ArrowLeft: i - 1, Home: 0, End: tabs.length - 1 }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      choose((to + tabs.length) % tabs.length, true);
    });
  });
  choose(all.indexOf(subject));
  return [h("div", { class: "tabs", role: "tablist", "aria-label": "Networks" }, tabs), panel];
}

function loading() {
  if (!document.querySelector('nav a[href="#load"]')) return null;
  const instructions = DOCUMENT.load;
  const code =
    typeof instructions === "string"
      ? instructions
      : [
          "import torch",
          "",
          '# after  plain = fit.collapse()  and  sr.save_network(plain, "network.pt2", x[:2])',
          'network = torch.export.load("network.pt2").module()',
          "outputs = network(x)",
        ].join("\n");
  return end(
    "load",
    "Load the network",
    h(
      "p",
      { class: "note" },
      "The collapsed network consists of plain torch modules and runs without symrazor.",
    ),
    h("pre", { tabindex: 0 }, code),
  );
}

const end = (id, title, ...children) =>
  h(
    "section",
    { class: "end", id, "aria-labelledby": `${id}-title` },
    h("h2", { id: `${id}-title` }, title),
    ...children,
  );

function numbers() {
  const several = DOCUMENT.questions.length > 1;
  const rows = DOCUMENT.questions.flatMap((q, i) =>
    trained(q).map(candidate => ({
      task: q.name || `question ${i + 1}`,
      network: candidate.name,
      reading: candidate.reading,
    })),
  );
  const task = several ? [{ name: "Task", key: "task" }] : [];
  const totals = rows.map(({ reading, ...row }) => ({
    ...row,
    ...reading.train,
    ...reading.evidence,
    complexity: complexity(reading.evidence || {}),
    effective: reading.layers?.length ? sum(reading.layers.map(effective)) : null,
    parameters: reading.layers?.length ? sum(reading.layers.map(parameters)) : null,
    ...reading.test,
  }));
  const wanted = [
    ["network", "Network"],
    ["log_evidence", "Log evidence"],
    ["log_likelihood", "Fit"],
    ["complexity", "Complexity"],
    ["per_datum", "Per data point"],
    ["effective", "Effective"],
    ["parameters", "Parameters"],
    ["accuracy", "Accuracy"],
    ["nll", "NLL"],
    ["ece", "ECE"],
    ["mse", "MSE"],
    ["rollout_error", "Rollout error"],
    ["n", "Data"],
    ["epochs", "Epochs"],
    ["seconds", "Seconds"],
  ];
  const fine = v => number(v, 4);
  const present = wanted
    .filter(([key]) => totals.some(row => row[key] !== undefined && row[key] !== null))
    .map(([key, name]) => ({ name, key, text: fine }));
  const paths = rows.flatMap(({ reading, ...row }) =>
    (reading.layers || []).flatMap(layer =>
      layer.paths.map(path => {
        const precisions = Object.values(path.precision || {}).filter(known);
        return {
          ...row,
          layer: moduleOf(layer),
          path: path.path,
          group: path.group,
          share: path.share,
          effective: path.effective_parameters,
          parameters: path.parameters,
          precision: precisions.length ? Math.exp(sum(precisions.map(Math.log)) / precisions.length) : null,
          error: worst(layer),
        };
      }),
    ),
  );
  const columns = [
    ...task,
    { name: "Network", key: "network" },
    { name: "Layer", key: "layer" },
    { name: "Path", key: "path" },
    { name: "Group", key: "group" },
    { name: "Share", key: "share", text: fine },
    { name: "Effective", key: "effective", text: fine },
    { name: "Parameters", key: "parameters" },
    { name: "Precision", key: "precision", text: fine },
    { name: "Error", key: "error", text: fine },
  ];
  const first = [...present.slice(0, 1), ...task, ...present.slice(1)];
  return end(
    "numbers",
    "All numbers",
    h(
      "p",
      { class: "note" },
      "Select a column heading to sort. Copies have six digits and keep the order shown.",
    ),
    fold(
      "Networks",
      h("h3", {}, "Networks"),
      sortable(first, totals, "Evidence, size and test metrics of each network"),
    ),
    paths.length > 0 &&
      fold(
        "Paths",
        h("h3", {}, "Paths"),
        sortable(columns, paths, "All paths of all layers; precision is the geometric mean over tensors"),
      ),
  );
}

function provenance() {
  const pairs = [
    ...Object.entries(DOCUMENT.versions || {}),
    ...Object.entries(DOCUMENT.data || {})
      .filter(([, v]) => v !== null)
      .map(([key, v]) => ["data: " + key, Array.isArray(v) ? v.join(", ") : v]),
  ];
  const config = (DOCUMENT.questions[0].candidates[0].reading || {}).config || {};
  const list = entries =>
    h(
      "dl",
      { class: "pairs" },
      entries.map(([key, value]) => [
        h("dt", {}, key),
        h("dd", {}, value === null ? "none" : typeof value === "object" ? JSON.stringify(value) : value),
      ]),
    );
  return end(
    "made",
    "How this report was made",
    DOCUMENT.command && [
      h("p", { class: "note" }, "Command:"),
      h("pre", { tabindex: 0 }, DOCUMENT.command),
    ],
    list(pairs),
    Object.keys(config).length > 0 &&
      h("details", {}, h("summary", {}, "Options of the evidence"), list(Object.entries(config))),
  );
}

function theme() {
  const button = document.getElementById("theme"),
    root = document.documentElement,
    prefers = matchMedia("(prefers-color-scheme: dark)");
  const stored = () => {
    try {
      return localStorage.getItem("symrazor-theme");
    } catch (error) {
      return null;
    }
  };
  const now = () => root.dataset.theme || (prefers.matches ? "dark" : "light");
  const label = () => {
    button.textContent = now() === "dark" ? "Light" : "Dark";
    button.setAttribute("aria-label", `Switch to ${now() === "dark" ? "light" : "dark"} colours`);
  };
  if (["light", "dark"].includes(stored())) root.dataset.theme = stored();
  button.addEventListener("click", () => {
    root.dataset.theme = now() === "dark" ? "light" : "dark";
    try {
      localStorage.setItem("symrazor-theme", root.dataset.theme);
    } catch (error) {
      /* a private window */
    }
    label();
  });
  prefers.addEventListener("change", label);
  button.hidden = false;
  label();
}

theme();
DOCUMENT.questions.forEach(question);
document.querySelector("main").append(...tags([loading(), numbers(), provenance()]));
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach(d => (d.open = true)));
document.documentElement.dataset.ready = "";
