"use strict";
// Draws the page's traces, which are over steps, by the controls: x axis, smoothing, runs.
(() => {
  const { content, grouped } = page;
  const { runs } = content;
  const charts = content.sections.flatMap((section) => section.charts);
  const longest = Math.max(...runs.map((run) => run.axis.steps.at(-1)));
  const SCALES = [0, 1, 3, 10, 30, 100, 300, 1000, 3000, 10000, 30000, 100000];
  const pick = (id) => document.getElementById(id);
  const chosen = (kind, chart) => document.querySelector(`[data-${kind}="${chart.id}"]`);
  const hidden = new Set();
  const isBand = () => pick("seeds")?.value === "band";
  const scale = () => SCALES[Number(pick("smoothing").value)];
  const faded = (hex, alpha) => hex + Math.round(255 * alpha).toString(16).padStart(2, "0");

  // x of sorted steps, interpolated linearly in the tables of runs; null without such an axis
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

  // bias-corrected exponential moving average over steps; null stays a gap
  function smoothed(steps, values, tau) {
    let sum = 0, weight = 0, last = null;
    return values.map((value, i) => {
      if (value === null || !tau) return value;
      const keep = Math.exp(-(last === null ? (steps[1] ?? 1) - steps[0] : steps[i] - last) / tau);
      last = steps[i];
      sum = keep * sum + (1 - keep) * value;
      weight = keep * weight + (1 - keep);
      return sum / weight;
    });
  }

  // the area between two lines, a polygon for each stretch without a gap
  function area(xs, low, high) {
    const x = [], y = [];
    for (let begin = 0; begin < xs.length; begin += 1) {
      let end = begin;
      while (end < xs.length && low[end] !== null) end += 1;
      const side = xs.slice(begin, end);
      if (side.length) {
        x.push(...side, ...side.reverse(), null);
        y.push(...high.slice(begin, end), ...low.slice(begin, end).reverse(), null);
        begin = end;
      }
    }
    return { x, y };
  }

  function shown(chart, trace, over) {
    const { entry, run, role, runs: members, at, low, high, members: rows } = trace.meta;
    const index = isBand() ? entry : run, tau = chart.smooth ? scale() : 0;
    if (index === null || hidden.has(index) || (role === "smooth" && !tau)) return [];
    const steps = trace.x, xs = at?.[over] ?? place(members, steps, over);
    const start = Number(pick("from").value) * longest, color = page.runColor(index);
    const cut = (values) => values.map((value, i) => (steps[i] < start ? null : value));
    const made = { ...trace, name: page.plain(page.short(trace.name)) };
    if (role === "band") {
      const members = tau ? rows.map((row) => smoothed(steps, row, tau)) : null;
      const edge = (given, by) => cut(members && given.map((value, i) =>
        (value === null ? null : by(...members.map((row) => row[i])))) || cut(given));
      const polygon = area(xs, edge(low, Math.min), edge(high, Math.max));
      return [{ ...made, ...polygon, mode: "lines", line: { width: 0 }, fillcolor: faded(color, 0.22) }];
    }
    const isFaint = role === "raw" && tau;
    const own = isFaint ? faded(color, 0.22) : color;
    const y = cut(role === "smooth" || role === "mean" ? smoothed(steps, trace.y, tau) : trace.y);
    return [{
      ...made, x: xs.map((x, i) => (steps[i] < start ? null : x)), y,
      customdata: steps.map((step) => grouped(Math.round(step))),
      line: { width: steps.length > 1000 ? 1.2 : 1.8, dash: page.runDash(index), ...trace.line, color: own },
      marker: { size: 5, ...trace.marker, color: own },
      ...(trace.error_y && { error_y: { thickness: 1, width: 3, color, ...trace.error_y } }),
      ...(isFaint && { hoverinfo: "skip", hovertemplate: null }),
    }];
  }

  function draw(chart) {
    const over = pick("over").value;
    const { traces } = chart.variants[Number(chosen("variant", chart)?.value ?? 0)];
    const logScale = chosen("log", chart).checked, logX = pick("log-x").checked;
    const title = over.replace("_", " ").replace("wall", "wall-clock");
    return Plotly.react(`curve-${chart.id}`, traces.flatMap((trace) => shown(chart, trace, over)), {
      ...page.layout(),
      showlegend: false,
      hovermode: "x unified",
      hoverdistance: 30,
      uirevision: [over, logX, logScale, pick("from").value, chosen("variant", chart)?.value].join(),
      xaxis: {
        ...page.axis(), exponentformat: "B", title: { text: title, standoff: 8 },
        type: logX ? "log" : "linear", showspikes: false, nticks: page.narrow() ? 5 : 9,
        rangemode: Number(pick("from").value) ? "normal" : "tozero",  // a single score has no range
        unifiedhovertitle: { text: `%{x:${over.endsWith("hours") ? ",.2f" : ",d"}} ${title}` },
      },
      yaxis: {
        ...page.axis(), exponentformat: "B", type: logScale ? "log" : "linear",
        nticks: logScale ? 5 : 7,
        // on a log axis plotly would label 0.5 as "5"
        tickformat: chart.form.endsWith("%") ? "~%" : logScale ? ".3~g" : "",
      },
      yaxis2: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true },
    }, page.config());
  }

  let isAsked = false;
  function redraw() {  // in the next frame: a slider sends more events than can be drawn
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
    const single = runs.map(({ label }, k) => ({ label, runs: [k] }));
    pick("legend").replaceChildren(...(isBand() ? content.entries : single).map((entry, k) => {
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
  // the default smoothing is at most a hundredth of the longest run
  const isLong = runs.some((run) => run.axis.steps.length >= 200);
  const fitting = SCALES.filter((tau) => isLong && tau <= longest / 100);
  pick("smoothing").value = String(Math.max(0, fitting.length - 1));
  fillLegend();
  redraw();
})();
