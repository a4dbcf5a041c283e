"use strict";
// What the scripts of all pages share: the page's JSON, its colours, texts, and plotly's set-up.
const page = (() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const touch = matchMedia("(pointer: coarse)");
  const narrow = () => innerWidth < 600;
  const bar = () => !touch.matches && !narrow();
  const dashes = ["solid", "dash", "dot", "dashdot"];

  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  // plotly reads its texts as a kind of HTML
  const plain = (text) =>
    text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const short = (text) => {  // on a phone the hover box has room for less
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
    // named one by one: plotly's own set has a button that sends the chart to its makers
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
    // draw now and when the colours change; then the page says that it is drawn
    start: (drawAll) => {
      dark.addEventListener("change", drawAll);
      drawAll().then(() => document.documentElement.setAttribute("data-drawn", "yes"));
    },
  };
})();
