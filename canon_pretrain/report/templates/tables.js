"use strict";
// Tables that a reader sorts by a click on a column's name and narrows down to some rows. What they
// show stands in the HTML; a cell of a column of class "num" is sorted by the number it begins with.
(() => {
  const collator = new Intl.Collator("en", { numeric: true, sensitivity: "base" });
  const element = (name, properties, ...children) => {
    const made = Object.assign(document.createElement(name), properties);
    made.append(...children);
    return made;
  };

  // null for what has no value: it stands last whichever way a column is sorted
  function keyOf(cell, numeric) {
    const text = cell.textContent.trim();
    if (!numeric) return text === "–" ? null : text || null;
    const number = text.replace("−", "-").replace(/[,+<\s]/g, "").match(/^-?\d+(\.\d+)?/);
    return number && Number(number[0]);
  }

  const compare = (a, b) => (typeof a === "string" ? collator.compare(a, b) : a - b || 0);

  function sortRows(table, original, column, direction) {
    const rows = original.map((row) => [row.cells[column.at], row])
      .map(([cell, row]) => [keyOf(cell, column.numeric), row]);
    if (direction) {
      const sign = direction === "ascending" ? 1 : -1;
      rows.sort(([a], [b]) => (
        a === null || b === null ? (a === null) - (b === null) : sign * compare(a, b)));
    }
    table.tBodies[0].append(...rows.map(([, row]) => row));
  }

  function makeSortable(table) {
    const original = [...table.tBodies[0].rows];
    [...table.tHead.rows[0].cells].forEach((head, at) => {
      const column = { at, numeric: head.classList.contains("num") };
      const first = column.numeric && !("rising" in head.dataset) ? "descending" : "ascending";
      const turn = { [first]: first === "ascending" ? "descending" : "ascending" };
      const button = element("button", { type: "button", className: "sort" }, ...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const now = head.getAttribute("aria-sort");
        const next = now === null ? first : turn[now] ?? null;  // third click: as it was
        for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
        if (next) head.setAttribute("aria-sort", next);
        sortRows(table, original, column, next);
      });
    });
  }

  function makeFilters(holder, rows, names) {
    const count = element("output", { className: "count" });
    const search = element("input", {
      type: "search", placeholder: "filter by name", autocomplete: "off",
    });
    search.setAttribute("aria-label", "Show what has this in its text");
    const choices = names.map((name) => {
      const values = [...new Set(rows.map((row) => row.dataset[name]))]
        .sort(collator.compare).map((value) => element("option", { value }, value));
      const select = element(
        "select", { autocomplete: "off" }, element("option", { value: "" }, `every ${name.replace("Name", "")}`),
        ...values,
      );
      select.dataset.filter = name;
      select.setAttribute("aria-label", name.replace("Name", ""));
      return select;
    });
    const texts = rows.map((row) => row.textContent.toLowerCase());
    const narrow = () => {
      const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      rows.forEach((row, i) => {
        row.hidden = !(choices.every((select) =>
          select.value === "" || row.dataset[select.dataset.filter] === select.value)
          && words.every((word) => texts[i].includes(word)));
        shown += !row.hidden;
      });
      count.textContent = `${shown < rows.length ? `${shown} of ` : ""}${rows.length} rows`;
    };
    for (const control of [search, ...choices]) control.addEventListener("input", narrow);
    const useful = choices.filter((select) => select.options.length > 2);
    holder.prepend(search, ...useful, count);
    holder.hidden = false;
    narrow();
  }

  for (const table of document.querySelectorAll("table.sortable")) makeSortable(table);
  for (const holder of document.querySelectorAll("[data-filters-of]")) {
    const rows = [...document.getElementById(holder.dataset.filtersOf).tBodies[0].rows];
    const names = holder.dataset.filters.split(" ").filter(Boolean);
    if (rows.length > 1) makeFilters(holder, rows, names);
    holder.hidden = false;
  }
  // a box that shows or hides the columns of one class
  for (const box of document.querySelectorAll("[data-columns]")) {
    const apply = () => document.getElementById(box.dataset.of)
      .classList.toggle(`with-${box.dataset.columns}`, box.checked);
    box.addEventListener("change", apply);
    apply();
  }
})();
