"use strict";
// Draws plotly's figures in the page's colors, hides runs, sorts and filters tables.
(() => {
  const hidden = new Set(), drawn = new Set();

  // the running sums of differences
  function sums(differences) {
    let sum = 0;
    return differences.map((difference) => (sum += difference));
  }

  // a figure has what all of its traces share only once, and steps and tokens as differences
  function unpack(shared, given) {
    const trace = { ...shared, ...given };
    const { steps, tokens, tokens_per_step: scale } = trace;
    if (steps) trace.customdata = sums(steps);
    if (tokens) trace.x = sums(tokens);
    else if (scale) trace.x = trace.customdata.map((step) => scale * step);
    return trace;
  }

  function draw(plot) {
    const { data, shared, layout } = JSON.parse(plot.dataset.figure);
    const traces = data.map((given) => {
      const trace = unpack(shared, given), { of, number: k } = trace, color = page.runColor(k);
      return {
        ...trace,
        name: page.plain(page.short(trace.name ?? page.content.labels[of][k])),
        visible: !hidden.has(`${of} ${k}`),
        line: { color, width: 1.8, dash: page.runDash(k), ...trace.line },
        ...(trace.fill && { fillcolor: `${color}2e` }),
        marker: { color, size: 6, ...trace.marker },
        error_y: { visible: false, ...trace.error_y, color, thickness: 1, width: 3 },
      };
    });
    const ticks = { x: Math.round(plot.clientWidth / 90), y: Math.round(plot.clientHeight / 50) };
    const axis = (name) => ({ ...page.axis(), nticks: ticks[name], ...layout[`${name}axis`] });
    drawn.add(plot);
    watcher.unobserve(plot);
    return Plotly.react(plot, traces, {
      ...page.layout(), hovermode: "x unified", showlegend: false, ...layout,
      xaxis: axis("x"), yaxis: axis("y"),
    }, page.config());
  }
  const redraw = () => Promise.all([...drawn].map(draw));

  // a plot is drawn when it is scrolled to, so that a report of many runs opens fast
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) draw(entry.target);
  }, { rootMargin: "400px" });
  const plots = [...document.querySelectorAll(".plot")];
  plots.forEach((plot) => watcher.observe(plot));
  addEventListener("beforeprint", () => {
    for (const folded of document.querySelectorAll("details")) folded.open = true;
    plots.forEach(draw);
  });

  // a click on a legend applies to all legends
  const buttons = [...document.querySelectorAll(".legend button")];
  for (const button of buttons) {
    button.addEventListener("click", () => {
      const { of } = button.dataset;
      if (!hidden.delete(of)) hidden.add(of);
      for (const same of buttons.filter((other) => other.dataset.of === of)) {
        same.setAttribute("aria-pressed", String(!hidden.has(of)));
      }
      redraw();
    });
  }

  // cells without a value are last in both directions
  const collator = new Intl.Collator("en", { numeric: true, sensitivity: "base" });
  function keyOf(cell) {
    const text = cell.textContent.trim();
    if (cell.cellIndex < Number(cell.closest("table").dataset.text)) return text;
    const number = parseFloat(text.replace("−", "-").replace(/[,+<\s▲◆▼]/g, ""));
    return Number.isNaN(number) ? "–" : number;
  }
  const compare = (a, b) => (typeof a === "string" ? collator.compare(a, b) : a - b);
  for (const table of document.querySelectorAll("table.pinned")) {
    const original = [...table.tBodies[0].rows], heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, at) => head.querySelector(".sort").addEventListener("click", () => {
      const turn = { none: "ascending", ascending: "descending", descending: "none" };
      const next = turn[head.ariaSort ?? "none"], sign = next === "descending" ? -1 : 1;
      for (const other of heads) other.ariaSort = "none";
      head.ariaSort = next;
      const rows = original.map((row) => [keyOf(row.cells[at]), row]);
      if (next !== "none") {
        rows.sort(([a], [b]) => (a === "–") - (b === "–") || (a !== "–" && sign * compare(a, b)));
      }
      table.tBodies[0].append(...rows.map(([, row]) => row));
    }));
  }

  // small print follows a cell's value
  const valueOf = (cell) => cell.firstChild.textContent.trim();
  for (const bar of document.querySelectorAll(".filters")) {
    const rows = [...bar.parentElement.querySelector("tbody").rows];
    const search = bar.querySelector("[type=search]"), selects = [...bar.querySelectorAll("select")];
    const narrow = () => {
      const words = search.value.toLowerCase().split(/\s+/);
      for (const row of rows) {
        const text = row.textContent.toLowerCase();
        row.hidden = !(words.every((word) => text.includes(word))
          && selects.every((s) => s.value === "" || valueOf(row.cells[s.dataset.column]) === s.value));
      }
      const shown = rows.filter((row) => !row.hidden).length;
      bar.querySelector("output").textContent = `${shown} of ${rows.length} rows`;
    };
    if (search) bar.addEventListener("input", narrow);
    if (search) narrow();
  }
  page.start(redraw);
})();
