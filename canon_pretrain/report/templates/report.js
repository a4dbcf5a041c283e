"use strict";
// Draws the training curves from the page's own JSON, and turns runs and architectures on and off.
// What can be read without it stands in the HTML.
(() => {
  const { content, runColor, plain, short, grouped } = page;
  const hidden = scores.hidden.run;

  function valueTrace(curve, line, k) {
    const { values } = line;
    // a value between two gaps has no line to be seen by
    const alone = values.map((v, i) => v !== null
      && (values[i - 1] ?? null) === null && (values[i + 1] ?? null) === null);
    const marked = values.length <= 40 || alone.includes(true);
    return {
      type: "scatter",
      mode: marked ? "lines+markers" : "lines",
      name: plain(short(line.run)),
      x: line.tokens ?? line.steps.map((step) => step * line.tokens_a_step),
      y: values,
      customdata: line.steps.map(grouped),
      connectgaps: false,
      line: {
        color: runColor(k), width: values.length > 1000 ? 1.2 : 1.8, dash: page.runDash(k),
      },
      marker: { color: runColor(k), size: values.length <= 40 ? 5 : alone.map((a) => (a ? 5 : 0)) },
      hovertemplate:
        `%{fullData.name}: <b>%{y:,.${curve.decimals}f}</b>, step %{customdata}<extra></extra>`,
    };
  }

  function gapTrace(line, k) {
    const at = line.values.flatMap((value, i) => (value === null ? [i] : []));
    return {
      type: "scatter",
      mode: "markers",
      name: plain(short(line.run)),
      yaxis: "y2",
      x: at.map((i) => line.tokens?.[i] ?? line.steps[i] * line.tokens_a_step),
      y: at.map(() => 0.02),
      customdata: at.map((i) => grouped(line.steps[i])),
      marker: { symbol: "x", size: 7, color: runColor(k) },
      hovertemplate: "%{fullData.name}: <b>not finite</b>, step %{customdata}<extra></extra>",
    };
  }

  function restartTrace(run, k) {
    const restarts = run.restarts.filter((restart) => restart.tokens !== null);
    return {
      type: "scatter",
      mode: "markers",
      name: plain(short(run.label)),
      yaxis: "y2",
      x: restarts.map((restart) => restart.tokens),
      y: restarts.map(() => 0.98),
      customdata: restarts.map((restart) => grouped(restart.from_step)),
      marker: { symbol: "triangle-down", size: 9, color: runColor(k) },
      hovertemplate:
        "%{fullData.name}: <b>restart</b> from step %{customdata}<extra></extra>",
    };
  }

  // then 2 and 5 between the powers of ten are ticks enough
  function overADecade(curve) {
    const figures = curve.lines.map((line) => line.figures).filter((f) => f !== null);
    const lowest = Math.min(...figures.map((f) => f.lowest.value));
    return Math.max(...figures.map((f) => f.highest.value)) > 10 * lowest;
  }

  const restartLine = (restart, k) => ({
    type: "line", xref: "x", yref: "paper", x0: restart.tokens, x1: restart.tokens, y0: 0, y1: 1,
    line: { color: runColor(k), width: 1, dash: "dot" },
  });

  function layout(curve, logScale) {
    const axis = page.axis();
    const restarts = curve.field === "tokens_per_second"
      ? content.runs.flatMap((run, k) => (hidden.has(k) ? [] : run.restarts
        .filter((restart) => restart.tokens !== null).map((restart) => restartLine(restart, k))))
      : [];
    return {
      ...page.layout(),
      showlegend: false,
      hovermode: "x unified",
      hoverdistance: 30,
      xaxis: {
        ...axis, title: { text: "tokens", standoff: 8 }, exponentformat: "B",
        unifiedhovertitle: { text: "%{x:,d} tokens" }, nticks: page.narrow() ? 5 : 10,
        showspikes: false,
      },
      yaxis: {
        ...axis, type: logScale ? "log" : "linear", exponentformat: "B",
        ...(logScale && overADecade(curve) ? { dtick: "D2" } : { nticks: logScale ? 5 : 7 }),
      },
      yaxis2: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true },
      shapes: restarts,
    };
  }

  function draw(curve) {
    const logScale = document.querySelector(`[data-log="${curve.field}"]`).checked;
    const traces = curve.lines.flatMap((line, k) => {
      const all = [valueTrace(curve, line, k), gapTrace(line, k)];
      if (curve.field === "tokens_per_second") all.push(restartTrace(content.runs[k], k));
      return all.map((trace) => ({ ...trace, visible: !hidden.has(k) }));
    });
    return Plotly.react(`curve-${curve.field}`, traces, layout(curve, logScale), page.config());
  }

  const plotOf = (curve) => document.getElementById(`curve-${curve.field}`);
  for (const curve of content.curves) lazy.add(plotOf(curve), () => draw(curve));

  for (const box of document.querySelectorAll("[data-log]")) {
    box.addEventListener("change", () =>
      lazy.redraw(plotOf(content.curves.find((curve) => curve.field === box.dataset.log))));
  }
  // a legend may stand over several groups of plots: its buttons go together
  for (const kind of ["run", "entry"]) {
    const buttons = [...document.querySelectorAll(`[data-${kind}]`)];
    for (const button of buttons) {
      button.addEventListener("click", () => {
        const k = Number(button.dataset[kind]), off = scores.hidden[kind];
        if (!off.delete(k)) off.add(k);
        for (const same of buttons.filter((other) => Number(other.dataset[kind]) === k)) {
          same.setAttribute("aria-pressed", String(!off.has(k)));
        }
        lazy.redrawAll();
      });
    }
  }
  page.start(lazy.redrawAll);
})();
