// Tables that sort and copy.

// Return a sortable table. columns: [{name, key, text?}]; numbers sort as numbers, empty cells last.
function sortable(columns, rows, caption) {
  const body = h("tbody", {});
  const isNumber = column => rows.some(row => known(row[column.key]));
  let order = [...rows];
  const fill = () =>
    body.replaceChildren(
      ...order.map(row =>
        h(
          "tr",
          {},
          columns.map((column, i) => {
            const value = row[column.key];
            const shown = known(value) ? (column.text || number)(value) : (value ?? "");
            return h(
              i ? "td" : "th",
              { class: isNumber(column) ? "num" : null, scope: i ? null : "row" },
              shown,
            );
          }),
        ),
      ),
    );
  const heads = columns.map(column =>
    h(
      "th",
      { scope: "col", class: isNumber(column) ? "num" : null, "aria-sort": "none" },
      h("button", { type: "button", onclick: () => sort(column) }, column.name),
    ),
  );
  function sort(column) {
    const head = heads[columns.indexOf(column)],
      down = head.getAttribute("aria-sort") === "ascending";
    heads.forEach(other =>
      other.setAttribute("aria-sort", other === head ? (down ? "descending" : "ascending") : "none"),
    );
    const empty = v => v === null || v === undefined || v === "";
    order = [...rows].sort((a, b) => {
      const [u, v] = [a[column.key], b[column.key]];
      if (empty(u) || empty(v)) return empty(u) - empty(v);
      const by = known(u) && known(v) ? u - v : String(u).localeCompare(String(v), "en", { numeric: true });
      return down ? -by : by;
    });
    fill();
  }
  fill();
  const csv = () =>
    [columns.map(c => c.name), ...order.map(row => columns.map(c => row[c.key]))]
      .map(line => line.map(cell).join(","))
      .join("\r\n") + "\r\n";
  const table = h("table", {}, captioned(caption), h("thead", {}, h("tr", {}, heads)), body);
  const status = h("span", { role: "status", class: "soft" });
  const copy = h(
    "button",
    {
      type: "button",
      onclick: async () => {
        status.textContent = (await copied(csv()))
          ? `Copied ${rows.length} rows`
          : "Could not copy: select the table instead";
      },
    },
    "Copy as CSV",
  );
  return [
    h(
      "div",
      {
        class: rows.length > 40 ? "scroll tall" : "scroll",
        tabindex: 0,
        role: "group",
        "aria-label": caption,
      },
      table,
    ),
    h("div", { class: "tools" }, copy, status),
  ];
}
// Quote text that starts with = + - @, which a spreadsheet would run as a formula; keep numbers.
function cell(value) {
  if (value === null || value === undefined) return "";
  if (known(value)) return String(value);
  const text = /^[=+\-@\t\r]/.test(value) ? "'" + value : String(value);
  return /[",\r\n]/.test(text) ? '"' + text.replaceAll('"', '""') + '"' : text;
}
async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch (error) {
    const area = h("textarea", { "aria-hidden": "true", class: "skip" });
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}
