"use strict";
// Shared by the scripts of all pages: the page's JSON, colors, texts and plotly settings.
const page = (() => {
  // a page that was copied without plotly's file says so, and shows its tables
  if (window.Plotly === undefined) {
    document.getElementById("without-plotly").hidden = false;
    window.Plotly = { react: () => Promise.resolve() };
  }

  const dark = matchMedia("(prefers-color-scheme: dark)");
  const touch = matchMedia("(pointer: coarse)");
  const narrow = () => innerWidth < 600;
  const bar = () => !touch.matches && !narrow();
  const dashes = ["solid", "dash", "dot", "dashdot"];

  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  // plotly renders some HTML in texts
  const plain = (text) =>
    text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const short = (text) => {  // shorter on a phone
    const half = narrow() ? 6 : 16;
    return text.length > 2 * half + 2 ? `${text.slice(0, half)}…${text.slice(-half)}` : text;
  };

  const axis = () => ({
    gridcolor: color("--grid"), zeroline: false, linecolor: color("--line"), automargin: true,
  });

  const layout = () => ({
    autosize: true,
    margin: { l: 52, r: 12, t: bar() ? 28 : 8, b: 40 },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: color("--soft"), activecolor: color("--ink") },
    dragmode: touch.matches ? false : "zoom",
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: color("--soft") },
    hoverlabel: {
      bgcolor: color("--card"), bordercolor: color("--line"),
      font: { color: color("--ink"), size: 12 }, namelength: -1,
    },
  });

  const config = () => ({
    responsive: true, displaylogo: false, displayModeBar: bar() ? "hover" : false,
    // an explicit list: plotly's default has a button that uploads the chart
    modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
  });

  return {
    content: JSON.parse(document.getElementById("content").textContent),
    color,
    runColor: (k) => color(`--run-${k % 8}`),
    runDash: (k) => dashes[Math.floor(k / 8) % dashes.length],
    plain,
    short,
    narrow,
    grouped: (count) => count.toLocaleString("en-US"),
    axis,
    layout,
    config,
    // draw now and when the color scheme changes, then set data-drawn
    start: (drawAll) => {
      dark.addEventListener("change", drawAll);
      drawAll().then(() => document.documentElement.setAttribute("data-drawn", "yes"));
    },
  };
})();
