"use strict";
// Draws a plot when it is scrolled to: a report of many runs and tasks opens at once all the same.
const lazy = (() => {
  const draws = new Map(), near = new Set();
  const show = (plot) => {
    watcher.unobserve(plot);
    near.add(plot);
    return draws.get(plot)();
  };
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) show(entry.target);
  }, { rootMargin: "400px" });
  addEventListener("beforeprint", () => {
    for (const folded of document.querySelectorAll("details")) folded.open = true;
    [...draws.keys()].forEach(show);
  });
  return {
    add: (plot, draw) => {
      draws.set(plot, draw);
      watcher.observe(plot);
    },
    // again, where it was drawn before; else it is drawn as it shall be when its turn comes
    redraw: (plot) => (near.has(plot) ? draws.get(plot)() : Promise.resolve()),
    redrawAll: () => Promise.all([...near].map((plot) => draws.get(plot)())),
  };
})();
