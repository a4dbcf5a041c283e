"use strict";
// Draws the plots from the page's own JSON, and turns runs and architectures on and off.
// What can be read without it stands in the HTML.
(() => {
  const { content, color, runColor, plain, short, grouped } = page;
  const runs = new Map(content.runs.map((run, k) => [run.label, k]));
  const MAX_BARS = 8;  // standard errors of more runs would hide each other
  const hidden = { run: new Set(), entry: new Set() };

  // a plot is drawn when it is scrolled to: a report of many runs opens at once all the same
  const draws = new Map(), near = new Set();
  function show(plot) {
    watcher.unobserve(plot);
    near.add(plot);
    return draws.get(plot)();
  }
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) show(entry.target);
  }, { rootMargin: "400px" });
  const redraw = (plot) => (near.has(plot) ? draws.get(plot)() : Promise.resolve());
  const redrawAll = () => Promise.all([...near].map(redraw));
  addEventListener("beforeprint", () => {
    for (const folded of document.querySelectorAll("details")) folded.open = true;
    [...draws.keys()].forEach(show);
  });

  // one line of a plot, of a run or of an architecture ("entry")
  const trace = (of, label, more) => {
    const k = of === "run" ? runs.get(label) : content.entries.indexOf(label);
    return {
      type: "scatter", mode: "lines", name: plain(short(label)), visible: !hidden[of].has(k),
      ...more,
      line: { color: runColor(k), width: 1.8, dash: page.runDash(k), ...more.line },
      marker: { color: runColor(k), size: 7, ...more.marker },
      error_y: { type: "data", thickness: 1, width: 3, color: runColor(k), visible: false,
        ...more.error_y },
    };
  };
  const digits = (value) =>
    value.toLocaleString("en-US", { minimumFractionDigits: 4, maximumFractionDigits: 4 });

  // -- training curves

  function valueTrace(curve, line) {
    const { values } = line;
    // a value between two gaps has no line to be seen by
    const alone = values.map((v, i) => v !== null
      && (values[i - 1] ?? null) === null && (values[i + 1] ?? null) === null);
    const few = values.length <= 40;
    return trace("run", line.run, {
      mode: few || alone.includes(true) ? "lines+markers" : "lines",
      x: line.tokens ?? line.steps.map((step) => step * line.tokens_a_step),
      y: values,
      customdata: line.steps.map(grouped),
      line: { width: values.length > 1000 ? 1.2 : 1.8 },
      marker: { size: few ? 5 : alone.map((a) => (a ? 5 : 0)) },
      hovertemplate:
        `%{fullData.name}: <b>%{y:,.${curve.decimals}f}</b>, step %{customdata}<extra></extra>`,
    });
  }

  // marks at the edge of the plot: [tokens, step] each
  const marks = (label, at, y, symbol, words) => trace("run", label, {
    mode: "markers",
    yaxis: "y2",
    x: at.map(([tokens]) => tokens),
    y: at.map(() => y),
    customdata: at.map(([, step]) => grouped(step)),
    marker: { symbol },
    hovertemplate: `%{fullData.name}: ${words} step %{customdata}<extra></extra>`,
  });

  const gapTrace = (line) => marks(
    line.run,
    line.values.flatMap((value, i) => (value === null
      ? [[line.tokens?.[i] ?? line.steps[i] * line.tokens_a_step, line.steps[i]]] : [])),
    0.02, "x", "<b>not finite</b>,",
  );

  const restartsOf = (run) => run.restarts.filter((restart) => restart.tokens !== null);
  const restartTrace = (run) => marks(
    run.label, restartsOf(run).map((restart) => [restart.tokens, restart.from_step]),
    0.98, "triangle-down", "<b>restart</b> from",
  );
  const restartLines = () => content.runs.flatMap((run, k) => (hidden.run.has(k) ? []
    : restartsOf(run).map(({ tokens }) => ({
      type: "line", xref: "x", yref: "paper", x0: tokens, x1: tokens, y0: 0, y1: 1,
      line: { color: runColor(k), width: 1, dash: "dot" },
    }))));

  // then 2 and 5 between the powers of ten are ticks enough
  function overADecade(curve) {
    const figures = curve.lines.map((line) => line.figures).filter((f) => f !== null);
    const lowest = Math.min(...figures.map((f) => f.lowest.value));
    return Math.max(...figures.map((f) => f.highest.value)) > 10 * lowest;
  }

  function drawCurve(curve, plot) {
    const logScale = document.querySelector(`[data-log="${curve.field}"]`).checked;
    const restarts = curve.field === "tokens_per_second";
    const traces = curve.lines.flatMap((line, k) => [
      valueTrace(curve, line), gapTrace(line),
      ...(restarts ? [restartTrace(content.runs[k])] : []),
    ]);
    const layout = {
      ...page.layout(),
      showlegend: false,
      hovermode: "x unified",
      hoverdistance: 30,
      xaxis: {
        ...page.axis(), title: { text: "tokens", standoff: 8 }, exponentformat: "B",
        unifiedhovertitle: { text: "%{x:,d} tokens" }, nticks: page.narrow() ? 5 : 10,
        showspikes: false,
      },
      yaxis: {
        ...page.axis(), type: logScale ? "log" : "linear", exponentformat: "B",
        ...(logScale && overADecade(curve) ? { dtick: "D2" } : { nticks: logScale ? 5 : 7 }),
      },
      yaxis2: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true },
      shapes: restarts ? restartLines() : [],
    };
    return Plotly.react(plot, traces, layout, page.config());
  }

  // -- small plots

  const layout = (x, y = {}) => ({
    ...page.layout(),
    margin: { l: 46, r: 10, t: 6, b: 36 },
    showlegend: false,
    hovermode: "closest",
    dragmode: false,
    xaxis: { ...page.axis(), nticks: 5, fixedrange: true, ...x },
    yaxis: { ...page.axis(), nticks: 5, fixedrange: true, ...y },
  });
  const titled = (text) => ({
    title: { text: plain(text), standoff: 4, font: { size: 12 } }, exponentformat: "B",
  });

  // a list that repeats one value is packed as that value
  function unpacked(packed) {
    const count = Math.max(...Object.values(packed).map((v) => (Array.isArray(v) ? v.length : 1)));
    return Object.fromEntries(Object.entries(packed).map(([name, v]) => (
      [name, Array.isArray(v) || name === "run" ? v : Array(count).fill(v)])));
  }

  function overTraining(at) {
    const lines = content.score_curves[Number(at)].lines.map(unpacked);
    const byTokens = lines.every((line) => !line.tokens.includes(null));
    const traces = lines.map((line) => trace("run", line.run, {
      mode: "lines+markers",
      x: byTokens ? line.tokens : line.steps,
      y: line.values.map((value) => (typeof value === "number" ? value : null)),
      text: line.steps.map((step, i) => [
        line.stderrs[i] === null ? "" : ` ± ${digits(Number(line.stderrs[i]))}`,
        line.bounds[i] === null ? "" : ` ${line.values[i] ? "≥" : "≤"} ${digits(line.bounds[i])}`,
        `<br>step ${grouped(step)}`,
        line.tokens[i] === null ? "" : `, ${grouped(line.tokens[i])} tokens`,
        line.counts[i] === null ? "" : `, n = ${grouped(line.counts[i])}`,
        line.limits[i] === null ? "" : "<br>first items only: not a result",
      ].join("")),
      line: { width: 1.6 },
      marker: {
        size: 6, symbol: line.limits.map((limit) => (limit === null ? "circle" : "circle-open")),
      },
      error_y: {
        array: line.stderrs.map((stderr) => Number(stderr) || 0),
        visible: content.runs.length <= MAX_BARS,
      },
      hovertemplate: "%{fullData.name}<br><b>%{y:,.4f}</b>%{text}<extra></extra>",
    }));
    return [traces, layout(titled(byTokens ? "tokens" : "step"))];
  }

  // the last half of the loss, or its difference to the baseline
  function late(kind) {
    const format = kind === "differences" ? "+.4f" : ".4f";
    const traces = content.late_loss.lines.map((line) => trace("run", line.run, {
      x: content.late_loss.tokens,
      y: line[kind],
      hovertemplate: `%{fullData.name}<br>%{x:,d} tokens: <b>%{y:${format}}</b><extra></extra>`,
    }));
    return [traces, layout(titled("tokens"))];
  }

  // a line per architecture: the mean over its runs, with a bar from the lowest to the highest
  const means = (lines, xOf, mode) => lines.map((line) => trace("entry", line.label, {
    mode,
    x: xOf(line),
    y: line.values,
    text: line.values.map((value, i) => [
      line.steps ? `<br>step ${grouped(line.steps[i])}` : "",
      line.n[i] > 1 ? `<br>${line.n[i]} runs, ${digits(line.low[i])} to ${digits(line.high[i])}`
        : "",
    ].join("")),
    error_y: {
      symmetric: false,
      visible: line.n.some((n) => n > 1),
      array: line.values.map((value, i) => (value === null ? 0 : line.high[i] - value)),
      arrayminus: line.values.map((value, i) => (value === null ? 0 : value - line.low[i])),
    },
    hovertemplate: "%{fullData.name}<br>%{x}: <b>%{y:.4f}</b>%{text}<extra></extra>",
  }));

  function heldOut() {
    const { lines } = content.held_out;
    const mode = lines.some((line) => line.values.length > 40) ? "lines" : "lines+markers";
    return [means(lines, (line) => line.tokens, mode), layout(titled("tokens"))];
  }

  const panels = content.lengths.flatMap((figure) => figure.panels.map((p) => [figure, p]));
  function overLength(at) {
    const [figure, { lengths, lines, chance }] = panels[Number(at)];
    const names = lengths.map(String);
    const drawn = layout(
      { type: "category", categoryorder: "array", categoryarray: names, ...titled(figure.unit) },
      { range: [-0.03, 1.03], nticks: 6, tickformat: ".1f" },
    );
    if (chance !== null) {
      drawn.shapes = [{
        type: "line", xref: "paper", x0: 0, x1: 1, y0: chance, y1: chance,
        line: { color: color("--soft"), width: 1.2, dash: "dash" },
      }];
      drawn.annotations = [{
        xref: "paper", x: 1, xanchor: "right", y: chance, yanchor: "bottom",
        text: `chance ${digits(chance).slice(0, 5)}`, showarrow: false,
        font: { size: 11, color: color("--soft") },
      }];
    }
    return [means(lines, () => names, "lines+markers"), drawn];
  }

  // -- every plot of the page by its attribute, and what a reader turns on and off

  const small = { responsive: true, displaylogo: false, displayModeBar: false };
  const figures = { heldOut, late, steps: overTraining, length: overLength };
  for (const plot of document.querySelectorAll(".plot")) {
    const kind = Object.keys(figures).find((name) => name in plot.dataset);
    const curve = content.curves.find(({ field }) => plot.id === `curve-${field}`);
    draws.set(plot, () => (kind ? Plotly.react(plot, ...figures[kind](plot.dataset[kind]), small)
      : drawCurve(curve, plot)));
    watcher.observe(plot);
  }
  for (const box of document.querySelectorAll("[data-log]")) {
    const plot = document.getElementById(`curve-${box.dataset.log}`);
    box.addEventListener("change", () => redraw(plot));
  }
  // a legend may stand over several groups of plots: its buttons go together
  for (const kind of ["run", "entry"]) {
    const buttons = [...document.querySelectorAll(`[data-${kind}]`)];
    for (const button of buttons) {
      button.addEventListener("click", () => {
        const k = button.dataset[kind], off = hidden[kind];
        if (!off.delete(Number(k))) off.add(Number(k));
        for (const same of buttons.filter((other) => other.dataset[kind] === k)) {
          same.setAttribute("aria-pressed", String(!off.has(Number(k))));
        }
        redrawAll();
      });
    }
  }
  page.start(redrawAll);
})();
