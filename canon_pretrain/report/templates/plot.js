"use strict";
// Draws the page's curves from its own JSON: over what, how smooth and which runs is chosen above.
(() => {
  const { content, plain, short, grouped } = page;
  const charts = content.sections.flatMap((section) => section.charts);
  const variantsOf = (chart) =>
    (chart.same_as ? charts.find((other) => other.id === chart.same_as) : chart).variants;
  const longest = Math.max(...content.runs.map((run) => run.axis.steps.at(-1)));
  const SCALES = [0, 1, 3, 10, 30, 100, 300, 1000, 3000, 10000, 30000, 100000];
  const FEW = 60;  // so many points are marked one by one
  const TITLES = {
    tokens: "tokens", steps: "steps", training_hours: "training hours",
    wall_hours: "wall-clock hours",
  };
  const FORMS = { tokens: ",d", steps: ",d", training_hours: ",.2f", wall_hours: ",.2f" };
  const pick = (id) => document.getElementById(id);
  const chosen = (kind, chart) => document.querySelector(`[data-${kind}="${chart.id}"]`);

  const hidden = new Set();
  const isBand = () => pick("seeds")?.value === "band";
  const isShown = (step) => step >= Number(pick("from").value) * longest;
  const scale = () => SCALES[Number(pick("smoothing").value)];
  const single = content.runs.map((run, k) => ({ label: run.label, runs: [k] }));
  const entries = () => (isBand() ? content.entries : single);

  // ---- where a step lies

  // the values at `steps` (in order) of the straight lines through (xs, ys); beyond, as at the end
  function between(steps, xs, ys) {
    let k = 0;
    return steps.map((step) => {
      while (k < xs.length - 2 && xs[k + 1] < step) k += 1;
      if (xs.length < 2) return ys[0];
      const share = (step - xs[k]) / (xs[k + 1] - xs[k]);
      return ys[k] + share * (ys[k + 1] - ys[k]);
    });
  }

  // x of a run's steps; null where the run has no such axis
  function place(runs, steps, over) {
    if (over === "steps") return steps;
    const tables = runs.map((k) => content.runs[k].axis).filter((axis) => axis[over] !== null);
    if (!tables.length) return steps.map(() => null);
    const each = tables.map((axis) => between(steps, axis.steps, axis[over]));
    return steps.map((_, i) => {
      const x = each.reduce((sum, xs) => sum + xs[i], 0) / each.length;
      return over === "tokens" ? Math.round(x) : x;
    });
  }

  // ---- smoothing

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

  // ---- traces

  const isNumber = (value) => typeof value === "number";
  const shown = (chart, value) => (chart.form.endsWith("%") ? `${(100 * value).toFixed(1)}%`
    : value.toLocaleString("en-US", { maximumSignificantDigits: 5 }));
  const isScatter = (chart, count) => chart.id.startsWith("eval_") || count <= FEW;
  const faded = (hex, alpha) => hex + Math.round(255 * alpha).toString(16).padStart(2, "0");
  const hover = (chart, words) =>
    `%{fullData.name}: <b>%{y:${chart.form}}</b>${words}<extra></extra>`;

  // where time jumps at a restart, the line has a gap
  function withJumps(rows, runs, over) {
    if (over !== "wall_hours") return rows;
    const jumps = runs.flatMap((k) => content.runs[k].launches.map((launch) => launch.from_step));
    return rows.flatMap((row, i) => {
      const next = rows[i + 1];
      const jumped = next && jumps.some((at) => row.step <= at && at < next.step);
      return jumped ? [row, { ...row, y: null }] : [row];
    });
  }

  function curve(chart, style, steps, values, over, more = {}) {
    const xs = place(style.runs, steps, over);
    const rows = withJumps(
      steps.map((step, i) => ({ step, x: xs[i], y: values[i], i })), style.runs, over,
    ).filter((row) => isShown(row.step));
    // a value between two gaps has no line to be seen by
    const alone = rows.map((row, i) => row.y !== null
      && (rows[i - 1]?.y ?? null) === null && (rows[i + 1]?.y ?? null) === null);
    const marked = isScatter(chart, rows.length);
    return {
      type: "scatter",
      mode: marked || alone.includes(true) ? "lines+markers" : "lines",
      name: plain(short(style.label)),
      x: rows.map((row) => row.x),
      y: rows.map((row) => row.y),
      customdata: rows.map((row) => [grouped(Math.round(row.step)), style.words?.(row.i) ?? ""]),
      connectgaps: false,
      line: { color: style.color, width: style.width, dash: style.dash },
      marker: { color: style.color, size: marked ? 5 : alone.map((a) => (a ? 5 : 0)) },
      hovertemplate: hover(chart, ", step %{customdata[0]}%{customdata[1]}"),
      ...more,
    };
  }

  const quiet = { hoverinfo: "skip", hovertemplate: null };

  function lineTraces(chart, line, style, over) {
    const tau = chart.smooth ? scale() : 0;
    const about = (i) => (line.errors
      ? (isNumber(line.errors[i]) ? `, ± ${line.errors[i].toPrecision(2)}` : "")
        + (line.limits[i] === null ? "" : `, of ${grouped(line.limits[i])} items only`) : "");
    const raw = { ...style, words: about, width: line.steps.length > 1000 ? 1.2 : 1.8 };
    if (!tau) return [curve(chart, raw, line.steps, line.values, over, errors(line, style))];
    const steps = line.mean_steps ?? line.steps, values = line.means ?? line.values;
    const faint = { ...raw, width: 1, color: faded(style.color, 0.22) };
    const words = (i) => (values[i] === null || page.narrow() ? "" : `, here ${shown(chart, values[i])}`);
    return [
      curve(chart, faint, line.steps, line.values, over, quiet),
      curve(chart, { ...style, width: 2, words }, steps, smoothed(steps, values, tau), over),
    ];
  }

  // standard errors of scores; one that was cut short is hollow
  function errors(line, style) {
    if (!line.errors) return {};
    const there = line.steps.flatMap((step, i) => (isShown(step) ? [i] : []));
    const cut = there.map((i) => line.limits[i] !== null);
    return {
      error_y: {
        type: "data", array: there.map((i) => (isNumber(line.errors[i]) ? line.errors[i] : 0)),
        thickness: 1, width: 3, color: style.color,
      },
      marker: {
        size: 7, color: cut.map((c) => (c ? "#ffffff" : style.color)),
        line: { width: 1.5, color: style.color },
      },
    };
  }

  // the area between two lines, a polygon for each stretch without a gap
  function area(style, steps, low, high, over, alpha) {
    const xs = place(style.runs, steps, over), x = [], y = [];
    const isThere = (i) => isShown(steps[i]) && low[i] !== null && high[i] !== null;
    for (let i = 0; i < xs.length; i += 1) {
      let end = i;
      while (end < xs.length && isThere(end)) end += 1;
      if (end > i) {
        if (x.length) { x.push(null); y.push(null); }
        x.push(...xs.slice(i, end), ...xs.slice(i, end).reverse(), xs[i]);
        y.push(...high.slice(i, end), ...low.slice(i, end).reverse(), high[i]);
      }
      i = end;
    }
    return {
      type: "scatter", mode: "lines", x, y, fill: "toself", line: { width: 0 },
      fillcolor: faded(style.color, alpha), name: plain(short(style.label)), meta: "band", ...quiet,
    };
  }

  const across = (rows, by) => rows[0].map((_, i) => {
    const values = rows.map((row) => row[i]);
    return values.includes(null) ? null : by(values);
  });
  const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

  function bandTraces(chart, band, lines, style, over) {
    const tau = chart.smooth ? scale() : 0;
    const traces = [area(style, band.steps, band.low, band.high, over, tau ? 0.08 : 0.22)];
    let { mean: middle, low, high } = band;
    if (tau) {
      const members = band.members.map((member) => smoothed(band.steps, member, tau));
      middle = across(members, mean);
      low = across(members, (values) => Math.min(...values));
      high = across(members, (values) => Math.max(...values));
      traces.push(area(style, band.steps, low, high, over, 0.22));
    }
    const words = (i) => (low[i] === null || page.narrow() ? "" :
      ` (${shown(chart, low[i])} to ${shown(chart, high[i])}, n = ${band.n})`);
    traces.push(curve(chart, { ...style, width: 2, words }, band.steps, middle, over));
    for (const k of style.runs) {  // what a longer run has after the others
      const line = lines[k];
      const from = line ? line.steps.findIndex((step) => step >= band.until) : -1;
      if (from >= 0 && from < line.steps.length - 1) {
        const own = { ...style, runs: [k], label: content.runs[k].label, width: 1 };
        const steps = line.steps.slice(from), values = line.values.slice(from);
        traces.push(curve(chart, own, steps, values, over));
      }
    }
    return traces;
  }

  // `rows` of [step, words on hover, x or null where it follows from the step]
  function marks(style, run, rows, over, height, symbol) {
    const kept = rows.filter(([step]) => isShown(step));
    const xs = place([run], kept.map(([step]) => step), over);
    return {
      type: "scatter", mode: "markers", name: plain(short(content.runs[run].label)), yaxis: "y2",
      x: xs.map((x, i) => kept[i][2] ?? x), y: kept.map(() => height),
      customdata: kept.map(([, words]) => words),
      marker: { symbol, size: 8, color: style.color },
      hovertemplate: "%{fullData.name}: %{customdata}<extra></extra>",
    };
  }

  const figure = (value) => (isNumber(value) ? value.toPrecision(4) : plain(String(value ?? "–")));

  function markTraces(chart, line, run, style, over) {
    const { launches, skips } = content.runs[run];
    const traces = [];
    if (line.gaps) {
      const rows = line.gaps.at.map(([step, value]) =>
        [step, `<b>${value}</b>, step ${grouped(step)}`]);
      traces.push(marks(style, run, rows, over, 0.02, "x"));
    }
    if (chart.skips && skips.length) {
      const rows = skips.map((skip) => [
        skip.step,
        `<b>skipped</b> step ${grouped(skip.step)}` + (page.narrow() ? ""
          : ` (${plain(skip.reason)}): loss ${figure(skip.loss)}, norm ${figure(skip.grad_norm)}`),
      ]);
      traces.push(marks(style, run, rows, over, 0.06, "triangle-up"));
    }
    if (chart.restarts && launches.length) {
      const rows = launches.map((launch) => [
        launch.from_step,
        page.narrow() ? `<b>restart</b> step ${grouped(launch.from_step)}`
          : `<b>restart</b> from step ${grouped(launch.from_step)}`
            + (launch.world_size === null ? "" : ` on ${launch.world_size} devices`)
            + (launch.time === null ? "" : `, ${plain(launch.time.slice(0, 16).replace("T", " "))}`),
        launch[over],
      ]);
      traces.push(marks(style, run, rows, over, 0.98, "triangle-down"));
    }
    return traces;
  }

  // ---- a chart

  const styleOf = (entry, k) => ({
    label: entry.label, runs: entry.runs, color: page.runColor(k), dash: page.runDash(k), width: 1.8,
  });

  function tracesOf(chart, over) {
    const variant = variantsOf(chart)[Number(chosen("variant", chart)?.value ?? 0)];
    return entries().flatMap((entry, k) => {
      if (hidden.has(k)) return [];
      const style = styleOf(entry, k);
      const band = isBand() ? variant.bands[k] : null;
      const there = entry.runs.filter((run) => variant.lines[run] !== null);
      const lines = band
        ? bandTraces(chart, band, variant.lines, style, over)
        : there.flatMap((run) => lineTraces(
          chart, variant.lines[run], { ...style, runs: [run], label: content.runs[run].label }, over,
        ));
      return [
        ...lines,
        ...there.flatMap((run) => markTraces(chart, variant.lines[run], run, style, over)),
      ];
    });
  }

  const restartLines = (traces) => traces
    .filter((trace) => trace.marker?.symbol === "triangle-down")
    .flatMap((trace) => trace.x.filter((x) => x !== null).map((x) => ({
      type: "line", xref: "x", yref: "paper", x0: x, x1: x, y0: 0, y1: 1,
      line: { color: trace.marker.color, width: 1, dash: "dot" },
    })));

  // then 2 and 5 between the powers of ten are ticks enough
  function overADecade(traces) {
    const values = traces.filter((trace) => !trace.yaxis).flatMap((trace) => trace.y)
      .filter((y) => y > 0);
    const [low, high] = values.reduce(
      ([a, b], y) => [Math.min(a, y), Math.max(b, y)], [Infinity, 0],
    );
    return high > 10 * low;
  }

  function draw(chart) {
    const over = chart.over_time ? chosen("time", chart).value : pick("over").value;
    const logScale = chosen("log", chart).checked, logX = pick("log-x").checked;
    const traces = tracesOf(chart, over);
    const axis = page.axis();
    const layout = {
      ...page.layout(),
      showlegend: false,
      hovermode: "x unified",
      hoverdistance: 30,
      uirevision: [over, logX, logScale, pick("from").value, chosen("variant", chart)?.value].join(),
      xaxis: {
        ...axis, title: { text: TITLES[over], standoff: 8 }, exponentformat: "B",
        type: logX ? "log" : "linear", showspikes: false, nticks: page.narrow() ? 5 : 9,
        rangemode: Number(pick("from").value) ? "normal" : "tozero",  // one score alone has no range
        unifiedhovertitle: { text: `%{x:${FORMS[over]}} ${TITLES[over]}` },
      },
      yaxis: {
        ...axis, type: logScale ? "log" : "linear", exponentformat: "B",
        // on a log axis plotly would call 0.5 "5"
        tickformat: chart.form.endsWith("%") ? "~%" : logScale ? ".3~g" : "",
        ...(logScale && overADecade(traces) ? { dtick: "D2" } : { nticks: logScale ? 5 : 7 }),
      },
      yaxis2: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true },
      shapes: restartLines(traces),
    };
    return Plotly.react(`curve-${chart.id}`, traces, layout, page.config());
  }

  const drawAll = () => Promise.all(charts.map(draw));

  // all of it with the next frame: a slider that is drawn along asks for more than can be shown
  let isAsked = false;
  function redraw() {
    document.documentElement.removeAttribute("data-drawn");
    if (isAsked) return;
    isAsked = true;
    requestAnimationFrame(() => {
      isAsked = false;
      drawAll().then(() => {
        if (!isAsked) document.documentElement.setAttribute("data-drawn", "yes");
      });
    });
  }

  // ---- what can be chosen

  function fillLegend() {
    pick("legend").replaceChildren(...entries().map((entry, k) => {
      const button = document.createElement("button");
      const swatch = document.createElement("span");
      swatch.className = "swatch";
      button.type = "button";
      button.style.setProperty("--run", `var(--run-${k % 8})`);
      button.setAttribute("aria-pressed", String(!hidden.has(k)));
      const count = entry.runs.length > 1 ? ` (n = ${entry.runs.length})` : "";
      button.append(swatch, entry.label + count);
      button.addEventListener("click", () => {
        if (!hidden.delete(k)) hidden.add(k);
        button.setAttribute("aria-pressed", String(!hidden.has(k)));
        redraw();
      });
      return button;
    }));
  }

  function saySmoothing() {
    pick("smoothing-value").textContent = scale() ? `over ${grouped(scale())} steps` : "off";
  }

  // a hundredth of the longest run at most to begin with: noise goes, the shape stays
  function firstSmoothing() {
    const lines = Math.max(...content.runs.map((run) => run.axis.steps.length));
    const fitting = SCALES.filter((tau) => lines >= 200 && tau <= longest / 100);
    pick("smoothing").value = String(Math.max(0, fitting.length - 1));
  }

  for (const kind of ["log", "time", "variant"]) {
    for (const control of document.querySelectorAll(`[data-${kind}]`)) {
      control.addEventListener("change", () =>
        draw(charts.find((chart) => chart.id === control.dataset[kind])));
    }
  }
  pick("smoothing").addEventListener("input", () => {
    saySmoothing();
    redraw();
  });
  for (const id of ["over", "log-x", "from"]) pick(id).addEventListener("change", redraw);
  pick("seeds")?.addEventListener("change", () => {
    hidden.clear();
    fillLegend();
    redraw();
  });
  firstSmoothing();
  saySmoothing();
  fillLegend();
  page.start(drawAll);
})();
