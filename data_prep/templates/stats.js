"use strict";
// Draws the page's plots from its JSON; the tables have the same numbers.
(() => {
  const { color, plain, grouped } = page;
  const splits = page.content.filter((split) => split.documents > 0);
  const MOST_GROUPS = 20;

  const splitColor = (split) => color(split.split === "train" ? "--split-0" : "--split-1");
  const cut = (text) => (text.length > 30 ? `${text.slice(0, 29)}…` : text);

  function lengthTrace(split, field) {
    const { bins } = split.lengths;
    return {
      type: "bar",
      name: split.split,
      x: bins.map((bin) => grouped(bin.from)),
      y: bins.map((bin) => bin[field] / split[field]),
      customdata: bins.map((bin) =>
        [`${grouped(bin.from)} to ${grouped(bin.to)} tokens`, grouped(bin[field])]),
      marker: { color: splitColor(split) },
      hovertemplate:
        `%{fullData.name}: <b>%{y:.2%}</b>, %{customdata[1]} ${field}` +
        "<br>in documents of %{customdata[0]}<extra></extra>",
    };
  }

  function frequencyTrace(split) {
    const { ranks, counts } = split.frequencies;
    return {
      type: "scatter",
      mode: "lines",
      name: split.split,
      x: ranks,
      y: counts.map((count) => count / split.tokens),
      customdata: counts.map(grouped),
      line: { color: splitColor(split), width: 1.8 },
      hovertemplate:
        "%{fullData.name}: rank %{x:,d}, <b>%{customdata}</b> times, %{y:.2~%}<extra></extra>",
    };
  }

  function groupTrace(split) {
    const rows = split.groups.slice(0, MOST_GROUPS).reverse();
    return {
      type: "bar",
      orientation: "h",
      name: split.split,
      y: rows.map((row) => plain(cut(row.group || "(none)"))),
      x: rows.map((row) => row.share),
      customdata: rows.map((row) => [grouped(row.tokens), grouped(row.documents)]),
      marker: { color: splitColor(split) },
      hovertemplate:
        "%{fullData.name}, %{y}: <b>%{x:.2%}</b><br>%{customdata[0]} tokens, "
        + "%{customdata[1]} documents<extra></extra>",
    };
  }

  function layout(xaxis, yaxis) {
    const common = page.layout();
    return {
      ...common,
      showlegend: splits.length > 1,
      legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 },
      barmode: "group",
      hoverlabel: { ...common.hoverlabel, align: "left" },
      xaxis: { ...page.axis(), ...xaxis },
      yaxis: { ...page.axis(), ...yaxis },
    };
  }

  const title = (text) => ({ title: { text, standoff: 8 } });
  const plots = {
    documents: () => [
      splits.map((split) => lengthTrace(split, "documents")),
      layout(
        { ...title("tokens in a document, from"), type: "category" },
        { ...title("documents"), tickformat: ".0%" },
      ),
    ],
    tokens: () => [
      splits.map((split) => lengthTrace(split, "tokens")),
      layout(
        { ...title("tokens in a document, from"), type: "category" },
        { ...title("tokens"), tickformat: ".0%" },
      ),
    ],
    groups: () => [
      splits.map(groupTrace),
      layout({ ...title("tokens"), tickformat: ".0%" }, { type: "category" }),
    ],
    frequencies: () => [
      splits.map(frequencyTrace),
      layout(
        { ...title("rank"), type: "log", dtick: 1 },
        { ...title("share of the tokens"), type: "log", dtick: 1, tickformat: ".0e" },
      ),
    ],
  };

  const drawAll = () => Promise.all(Object.entries(plots).map(([name, plot]) => {
    const place = document.getElementById(`plot-${name}`);
    return place && Plotly.react(place, ...plot(), page.config());
  }));

  page.start(drawAll);
})();
