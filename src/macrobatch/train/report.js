"use strict";
// The numbers under the pointer, or under a finger.
const charts = JSON.parse(document.getElementById("data").textContent);

function nearest(points, step) {
  let low = 0, high = points.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < step) low = middle; else high = middle;
  }
  return Math.abs(points[low][0] - step) <= Math.abs(points[high][0] - step) ? points[low] : points[high];
}

const shown = (value) => (value !== 0 && Math.abs(value) < 0.01 ? value.toExponential(2)
  : value.toLocaleString("en", { maximumFractionDigits: Math.abs(value) < 1000 ? 4 : 0 }));

for (const figure of document.querySelectorAll(".chart")) {
  const { steps: [first, last], lines } = charts[figure.dataset.chart];
  const longest = lines.reduce((a, b) => (b.points.length > a.points.length ? b : a));

  for (const frame of figure.querySelectorAll(".frame")) watch(frame);

  function watch(frame) {
    const [plot, cursor, readout] = [".plot", ".cursor", ".readout"].map((name) => frame.querySelector(name));

    function move(event) {
      const box = plot.getBoundingClientRect();
      const share = Math.min(Math.max((event.clientX - box.left) / box.width, 0), 1);
      const step = nearest(longest.points, first + share * (last - first))[0];
      const left = `${(100 * (step - first)) / (last - first)}%`;
      cursor.style.left = readout.style.left = left;
      const numbers = lines.filter((line) => line.points.length).map((line) => {
        const [at, value] = nearest(line.points, step);
        return `${line.name}  ${shown(value)}${at === step ? "" : `  at step ${at.toLocaleString("en")}`}`;
      });
      readout.textContent = [`step ${step.toLocaleString("en")}`, ...numbers].join("\n");
      readout.classList.toggle("left", share > 0.5);
      cursor.hidden = readout.hidden = false;
    }

    plot.addEventListener("pointermove", move);
    plot.addEventListener("pointerdown", move);
    plot.addEventListener("pointerleave", () => { cursor.hidden = readout.hidden = true; });
  }
}
