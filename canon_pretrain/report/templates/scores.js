"use strict";
// Draws the many small plots: scores over training steps, accuracy over length.
const scores = (() => {
  const { content, color, runColor, plain, short, grouped } = page;
  const runs = new Map(content.runs.map((run, k) => [run.label, k]));
  const MAX_BARS = 8;  // standard errors of more runs would hide each other
  const hidden = { run: new Set(), entry: new Set() };

  const layout = (x, y) => ({
    ...page.layout(),
    margin: { l: 46, r: 10, t: 6, b: 36 },
    showlegend: false,
    hovermode: "closest",
    dragmode: false,
    xaxis: { ...page.axis(), nticks: 5, fixedrange: true, ...x },
    yaxis: { ...page.axis(), nticks: 5, fixedrange: true, ...y },
  });
  const config = { responsive: true, displaylogo: false, displayModeBar: false };
  const digits = (value) =>
    value.toLocaleString("en-US", { minimumFractionDigits: 4, maximumFractionDigits: 4 });

  // a list that repeats one value is packed as that value
  function unpacked(packed) {
    const count = Math.max(...Object.values(packed).map((v) => (Array.isArray(v) ? v.length : 1)));
    return Object.fromEntries(Object.entries(packed).map(([name, v]) => (
      [name, Array.isArray(v) || name === "run" ? v : Array(count).fill(v)])));
  }

  const titled = (text) => ({
    title: { text, standoff: 4, font: { size: 12 } }, exponentformat: "B",
  });

  function overTraining(curve) {
    const lines = curve.lines.map(unpacked);
    const byTokens = lines.every((line) => !line.tokens.includes(null));
    const traces = lines.map((line) => {
      const k = runs.get(line.run);
      const words = line.steps.map((step, i) => [
        line.stderrs[i] === null ? "" : ` ± ${digits(Number(line.stderrs[i]))}`,
        line.bounds[i] === null ? "" : ` ${line.values[i] ? "≥" : "≤"} ${digits(line.bounds[i])}`,
        `<br>step ${grouped(step)}`,
        line.tokens[i] === null ? "" : `, ${grouped(line.tokens[i])} tokens`,
        line.counts[i] === null ? "" : `, n = ${grouped(line.counts[i])}`,
        line.limits[i] === null ? "" : "<br>first items only: not a result",
      ].join(""));
      const number = (value) => (typeof value === "number" ? value : null);
      return {
        type: "scatter",
        mode: "lines+markers",
        name: plain(short(line.run)),
        visible: !hidden.run.has(k),
        x: byTokens ? line.tokens : line.steps,
        y: line.values.map(number),
        text: words,
        line: { color: runColor(k), width: 1.6, dash: page.runDash(k) },
        marker: {
          color: runColor(k), size: 6,
          symbol: line.limits.map((limit) => (limit === null ? "circle" : "circle-open")),
        },
        error_y: {
          type: "data", array: line.stderrs.map((stderr) => Number(stderr) || 0), thickness: 1,
          width: 3, color: runColor(k), visible: content.runs.length <= MAX_BARS,
        },
        hovertemplate: "%{fullData.name}<br><b>%{y:,.4f}</b>%{text}<extra></extra>",
      };
    });
    return [traces, layout(titled(byTokens ? "tokens" : "step"), {})];
  }

  // the last half of the loss, or its difference to the baseline
  function late(kind) {
    const format = kind === "differences" ? "+.4f" : ".4f";
    const traces = content.late_loss.lines.map((line) => {
      const k = runs.get(line.run);
      return {
        type: "scatter",
        mode: "lines",
        name: plain(short(line.run)),
        visible: !hidden.run.has(k),
        x: content.late_loss.tokens,
        y: line[kind],
        line: { color: runColor(k), width: 1.8, dash: page.runDash(k) },
        hovertemplate: `%{fullData.name}<br>%{x:,d} tokens: <b>%{y:${format}}</b><extra></extra>`,
      };
    });
    return [traces, layout(titled("tokens"), {})];
  }

  // a line per architecture: the mean over its runs, with a bar from the lowest to the highest
  function means(lines, xOf, mode) {
    return lines.map((line) => {
      const k = content.entries.indexOf(line.label);
      const spread = line.values.map((value, i) => [
        line.steps ? `<br>step ${grouped(line.steps[i])}` : "",
        line.n[i] > 1 ? `<br>${line.n[i]} runs, ${digits(line.low[i])} to ${digits(line.high[i])}`
          : "",
      ].join(""));
      return {
        type: "scatter",
        mode,
        name: plain(short(line.label)),
        visible: !hidden.entry.has(k),
        x: xOf(line),
        y: line.values,
        text: spread,
        line: { color: runColor(k), width: 1.8, dash: page.runDash(k) },
        marker: { color: runColor(k), size: 7 },
        error_y: {
          type: "data", symmetric: false, thickness: 1, width: 3, color: runColor(k),
          visible: line.n.some((n) => n > 1),
          array: line.values.map((value, i) => (value === null ? 0 : line.high[i] - value)),
          arrayminus: line.values.map((value, i) => (value === null ? 0 : value - line.low[i])),
        },
        hovertemplate: "%{fullData.name}<br>%{x}: <b>%{y:.4f}</b>%{text}<extra></extra>",
      };
    });
  }

  function heldOut() {
    const { lines } = content.held_out;
    const mode = lines.some((line) => line.values.length > 40) ? "lines" : "lines+markers";
    return [means(lines, (line) => line.tokens, mode), {
      ...layout({ title: { text: "tokens", standoff: 4 }, exponentformat: "B" }, {}),
      hovermode: "closest",
    }];
  }

  function overLength([figure, panel]) {
    const names = panel.lengths.map(String);
    const traces = means(panel.lines, () => names, "lines+markers");
    const drawn = layout(
      {
        type: "category", categoryorder: "array", categoryarray: names,
        title: { text: plain(figure.unit), standoff: 4, font: { size: 12 } },
      },
      { range: [-0.03, 1.03], nticks: 6, tickformat: ".1f" },
    );
    if (panel.chance !== null) {
      drawn.shapes = [{
        type: "line", xref: "paper", x0: 0, x1: 1, y0: panel.chance, y1: panel.chance,
        line: { color: color("--soft"), width: 1.2, dash: "dash" },
      }];
      drawn.annotations = [{
        xref: "paper", x: 1, xanchor: "right", y: panel.chance, yanchor: "bottom",
        text: `chance ${digits(panel.chance).slice(0, 5)}`, showarrow: false,
        font: { size: 11, color: color("--soft") },
      }];
    }
    return [traces, drawn];
  }

  const panels = content.lengths.flatMap((figure) => figure.panels.map((p) => [figure, p]));
  const figures = {
    heldOut,
    late,
    steps: (at) => overTraining(content.score_curves[Number(at)]),
    length: (at) => overLength(panels[Number(at)]),
  };
  for (const plot of document.querySelectorAll(".plot")) {
    const kind = Object.keys(figures).find((name) => name in plot.dataset);
    if (kind) {
      lazy.add(plot, () => Plotly.react(plot, ...figures[kind](plot.dataset[kind]), config));
    }
  }
  return { hidden };
})();
