"use strict";
// Draws the figures of the page's JSON by the name of their place: traces of a color, and two axes.
(() => {
  const colored = (trace) => {
    const color = page.color(trace.meta);  // a CSS variable
    return trace.type === "bar" ? { ...trace, marker: { color } }
      : { ...trace, line: { color, width: 1.8 } };
  };
  const axis = ({ title, ...more }) => ({
    ...page.axis(), ...(title && { title: { text: title, standoff: 8 } }), ...more,
  });
  const layout = ({ traces, xaxis, yaxis }) => {
    const common = page.layout();
    return {
      ...common,
      showlegend: traces.length > 1,
      legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 },
      barmode: "group",
      hoverlabel: { ...common.hoverlabel, align: "left" },
      xaxis: axis(xaxis),
      yaxis: axis(yaxis),
    };
  };

  page.start(() => Promise.all(Object.entries(page.content).map(([name, figure]) => {
    const place = document.getElementById(`plot-${name}`);
    return place && Plotly.react(place, figure.traces.map(colored), layout(figure), page.config());
  })));
})();
