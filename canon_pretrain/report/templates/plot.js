"use strict";
// Draws the curves from the page's own JSON: over what, how smooth and which runs is chosen above.
(() => {
  const { content, plain, short, grouped } = page;
  const { runs } = content;
  const charts = content.sections.flatMap((section) => section.charts);
  const longest = Math.max(...runs.map((run) => run.axis.steps.at(-1)));
  const SCALES = [0, 1, 3, 10, 30, 100, 300, 1000, 3000, 10000, 30000, 100000];
  const TITLES = {
    tokens: "tokens", steps: "steps", training_hours: "training hours",
    wall_hours: "wall-clock hours",
  };
  const pick = (id) => document.getElementById(id);
  const chosen = (kind, chart) => document.querySelector(`[data-${kind}="${chart.id}"]`);
  const hidden = new Set();
  const isBand = () => pick("seeds")?.value === "band";
  const isShown = (step) => step >= Number(pick("from").value) * longest;
  const scale = () => SCALES[Number(pick("smoothing").value)];
  const single = runs.map((run, k) => ({ label: run.label, runs: [k] }));
  const entries = () => (isBand() ? content.entries : single);

  // x of steps (in order) by the tables of runs, straight between two rows; null without such an axis
  function place(members, steps, over) {
    if (over === "steps") return steps;
    const tables = members.map((k) => runs[k].axis).filter((axis) => axis[over] !== null);
    const sums = steps.map(() => (tables.length ? 0 : null));
    for (const { steps: xs, [over]: ys } of tables) {
      let k = 0;
      steps.forEach((step, i) => {
        while (k < xs.length - 2 && xs[k + 1] < step) k += 1;
        const rise = xs.length < 2 ? 0 : (ys[k + 1] - ys[k]) / (xs[k + 1] - xs[k]);
        sums[i] += (ys[k] + rise * (step - xs[k])) / tables.length;
      });
    }
    return over === "tokens" && tables.length ? sums.map(Math.round) : sums;
  }

  // exponential moving average over steps, without the bias of its first values; null stays a gap
  function smoothed(steps, values, tau) {
    let sum = 0, weight = 0, last = null;
    return values.map((value, i) => {
      if (value === null) return null;
      const passed = last === null ? (steps[1] ?? 1) - steps[0] : steps[i] - last;
      const keep = Math.exp(-passed / tau);
      last = steps[i];
      sum = keep * sum + (1 - keep) * value;
      weight = keep * weight + (1 - keep);
      return sum / weight;
    });
  }

  // ---- traces: a style is the label, the runs and the color of what is drawn

  const brief = (value) => value?.toLocaleString(
    "en-US", { maximumSignificantDigits: page.narrow() ? 3 : 5 });
  const quiet = { hoverinfo: "skip", hovertemplate: null };
  const faded = (hex, alpha) => hex + Math.round(255 * alpha).toString(16).padStart(2, "0");
  const named = (style, more) => ({ type: "scatter", name: plain(short(style.label)), ...more });

  function curve(chart, style, steps, values, over, more = {}) {
    const xs = place(style.runs, steps, over);
    const jumps = style.runs.flatMap((k) => runs[k].launches.steps);
    const rows = steps.flatMap((step, i) => {
      const row = { step, x: xs[i], y: values[i], words: style.words?.[i] ?? "" };
      // where time jumps at a restart, the line has a gap
      const jumped = over === "wall_hours" && jumps.some((at) => step <= at && at < steps[i + 1]);
      return !isShown(step) ? [] : jumped ? [row, { ...row, y: null }] : [row];
    });
    // a value between two gaps has no line to be seen by
    const isThere = (i) => (rows[i]?.y ?? null) !== null;
    const sizes = rows.map((_, i) =>
      (rows.length <= 60 || (isThere(i) && !isThere(i - 1) && !isThere(i + 1)) ? 5 : 0));
    return named(style, {
      mode: sizes.some((size) => size) ? "lines+markers" : "lines",
      x: rows.map((row) => row.x),
      y: rows.map((row) => row.y),
      customdata: rows.map((row) => [grouped(Math.round(row.step)), row.words]),
      line: { color: style.color, width: style.width, dash: style.dash },
      marker: { color: style.color, size: sizes },
      hovertemplate: `%{fullData.name}: <b>%{y:${chart.form}}</b>, step %{customdata[0]}`
        + "%{customdata[1]}<extra></extra>",
      ...more,
    });
  }

  function lineTraces(chart, line, style, over, tau) {
    const raw = { ...style, words: line.words, width: line.steps.length > 1000 ? 1.2 : 1.8 };
    if (tau) {
      const steps = line.mean_steps ?? line.steps, values = line.means ?? line.values;
      const faint = { ...raw, width: 1, color: faded(style.color, 0.22) };
      const words = values.map((value) => (value === null ? "" : `, here ${brief(value)}`));
      return [
        curve(chart, faint, line.steps, line.values, over, quiet),
        curve(chart, { ...style, words }, steps, smoothed(steps, values, tau), over),
      ];
    }
    if (!line.errors) return [curve(chart, raw, line.steps, line.values, over)];
    // standard errors of scores; a trial's is hollow
    const there = line.steps.flatMap((step, i) => (isShown(step) ? [i] : []));
    const color = there.map((i) => (line.limits[i] === null ? style.color : "#ffffff"));
    const array = there.map((i) => (typeof line.errors[i] === "number" ? line.errors[i] : 0));
    return [curve(chart, raw, line.steps, line.values, over, {
      mode: "lines+markers",
      error_y: { type: "data", array, thickness: 1, width: 3, color: style.color },
      marker: { size: 7, color, line: { width: 1.5, color: style.color } },
    })];
  }

  // the area between two lines, a polygon for each stretch without a gap
  function area(style, steps, low, high, over, alpha) {
    const xs = place(style.runs, steps, over), x = [], y = [];
    const isThere = (i) => i < steps.length && isShown(steps[i]) && low[i] !== null;
    for (let begin = 0; begin < steps.length; begin += 1) {
      let end = begin;
      while (isThere(end)) end += 1;
      const side = xs.slice(begin, end);
      if (side.length) {
        x.push(...side, ...side.reverse(), null);
        y.push(...high.slice(begin, end), ...low.slice(begin, end).reverse(), null);
        begin = end;
      }
    }
    const fillcolor = faded(style.color, alpha);
    return named(style, { mode: "lines", x, y, fill: "toself", line: { width: 0 }, fillcolor, ...quiet });
  }

  function bandTraces(chart, band, lines, style, over, tau) {
    const traces = [area(style, band.steps, band.low, band.high, over, tau ? 0.08 : 0.22)];
    let { mean, low, high } = band;
    if (tau) {
      const members = band.members.map((member) => smoothed(band.steps, member, tau));
      const across = (by) => mean.map((value, i) =>
        (value === null ? null : by(members.map((member) => member[i]))));
      mean = across((values) => values.reduce((sum, value) => sum + value, 0) / values.length);
      low = across((values) => Math.min(...values));
      high = across((values) => Math.max(...values));
      traces.push(area(style, band.steps, low, high, over, 0.22));
    }
    const words = low.map((value, i) => `<br>${brief(value)} to ${brief(high[i])}, n = ${band.n}`);
    traces.push(curve(chart, { ...style, words }, band.steps, mean, over));
    for (const k of style.runs) {  // what a longer run has after the others
      const from = lines[k]?.steps.findIndex((step) => step >= band.until) ?? -1;
      if (from >= 0 && from < lines[k].steps.length - 1) {
        const own = { ...style, runs: [k], label: runs[k].label, width: 1 };
        const [steps, values] = [lines[k].steps.slice(from), lines[k].values.slice(from)];
        traces.push(curve(chart, own, steps, values, over));
      }
    }
    return traces;
  }

  // what happened at steps: a symbol at a height, or a dotted line from bottom to top
  function marks(style, run, { steps, words, ...own }, over, symbol, height) {
    const xs = own[over] ?? place([run], steps, over);
    const kept = steps.flatMap((step, i) => (isShown(step) ? [i] : []));
    const times = symbol ? 1 : 3;
    const each = (by) => kept.flatMap((i) => Array.from({ length: times }, (_, part) => by(i, part)));
    return named({ label: runs[run].label }, {
      mode: symbol ? "markers" : "lines", yaxis: "y2", meta: symbol ?? "restart",
      x: each((i) => xs[i]), y: each((_, part) => (symbol ? height : [0, 1, null][part])),
      customdata: each((i) => words[i]), marker: { symbol, size: 8, color: style.color },
      line: { color: style.color, width: 1, dash: "dot" },
      hovertemplate: "%{fullData.name}: %{customdata}<extra></extra>",
    });
  }

  function tracesOf(chart, over) {
    const variants = (charts.find((other) => other.id === chart.same_as) ?? chart).variants;
    const variant = variants[Number(chosen("variant", chart)?.value ?? 0)];
    const tau = chart.smooth ? scale() : 0;
    return entries().flatMap((entry, k) => {
      if (hidden.has(k)) return [];
      const style = { ...entry, color: page.runColor(k), dash: page.runDash(k), width: 2 };
      const there = entry.runs.filter((run) => variant.lines[run] !== null);
      const band = isBand() ? variant.bands[k] : null;
      const lines = band ? bandTraces(chart, band, variant.lines, style, over, tau)
        : there.flatMap((run) => lineTraces(
          chart, variant.lines[run], { ...style, runs: [run], label: runs[run].label }, over, tau,
        ));
      return [...lines, ...there.flatMap((run) => [
        variant.lines[run].gaps && marks(style, run, variant.lines[run].gaps, over, "x", 0.02),
        chart.skips && marks(style, run, runs[run].skips, over, "triangle-up", 0.06),
        chart.restarts && marks(style, run, runs[run].launches, over),
      ].filter((trace) => trace && trace.x.length))];
    });
  }

  function draw(chart) {
    const over = chart.same_as ? chosen("time", chart).value : pick("over").value;
    const logScale = chosen("log", chart).checked, logX = pick("log-x").checked;
    const axis = { ...page.axis(), exponentformat: "B" };
    return Plotly.react(`curve-${chart.id}`, tracesOf(chart, over), {
      ...page.layout(),
      showlegend: false,
      hovermode: "x unified",
      hoverdistance: 30,
      uirevision: [over, logX, logScale, pick("from").value, chosen("variant", chart)?.value].join(),
      xaxis: {
        ...axis, title: { text: TITLES[over], standoff: 8 }, type: logX ? "log" : "linear",
        showspikes: false, nticks: page.narrow() ? 5 : 9,
        rangemode: Number(pick("from").value) ? "normal" : "tozero",  // one score alone has no range
        unifiedhovertitle: { text: `%{x:${over.endsWith("hours") ? ",.2f" : ",d"}} ${TITLES[over]}` },
      },
      yaxis: {
        ...axis, type: logScale ? "log" : "linear", nticks: logScale ? 5 : 7,
        // on a log axis plotly would call 0.5 "5"
        tickformat: chart.form.endsWith("%") ? "~%" : logScale ? ".3~g" : "",
      },
      yaxis2: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true },
    }, page.config());
  }

  // ---- what can be chosen

  let isAsked = false;
  function redraw() {  // with the next frame: a slider asks for more than can be shown
    document.documentElement.removeAttribute("data-drawn");
    pick("smoothing-value").textContent = scale() ? `over ${grouped(scale())} steps` : "off";
    if (isAsked) return;
    isAsked = true;
    requestAnimationFrame(() => {
      isAsked = false;
      Promise.all(charts.map(draw)).then(
        () => isAsked || document.documentElement.setAttribute("data-drawn", "yes"),
      );
    });
  }

  function fillLegend() {
    pick("legend").replaceChildren(...entries().map((entry, k) => {
      const button = document.createElement("button"), swatch = document.createElement("span");
      swatch.className = "swatch";
      button.type = "button";
      button.style.setProperty("--run", `var(--run-${k % 8})`);
      button.append(swatch, entry.label + (entry.runs.length > 1 ? ` (n = ${entry.runs.length})` : ""));
      button.addEventListener("click", () => {
        if (!hidden.delete(k)) hidden.add(k);
        button.setAttribute("aria-pressed", String(!hidden.has(k)));
        redraw();
      });
      return button;
    }));
  }

  for (const control of document.querySelectorAll("select, input")) {
    control.addEventListener("input", () => {
      if (control.id === "seeds") {
        hidden.clear();
        fillLegend();
      }
      redraw();
    });
  }
  // a hundredth of the longest run at most to begin with: noise goes, the shape stays
  const isLong = runs.some((run) => run.axis.steps.length >= 200);
  const fitting = SCALES.filter((tau) => isLong && tau <= longest / 100);
  pick("smoothing").value = String(Math.max(0, fitting.length - 1));
  fillLegend();
  redraw();
})();
