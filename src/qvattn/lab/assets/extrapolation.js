"use strict";
// Draws perplexity against length. Text from data reaches the page as text only.
(() => {
  const lines = JSON.parse(document.getElementById("data").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const colours = ["#0b62a8", "#c2571a", "#2f8f4e", "#8a4fb0", "#b3263a", "#7a6a16", "#1b9aa0", "#8c5a3c", "#777777", "#d1679a"];
  const symbols = ["circle", "square", "diamond", "triangle-up", "x", "cross", "star", "triangle-down", "hexagon", "pentagon"];

  function draw() {
    const axis = { gridcolor: style("--line"), zerolinecolor: style("--line"), automargin: true, fixedrange: true };
    const lengths = lines[0].cells.map((cell) => cell.length);
    Plotly.newPlot("curves", lines.map((line, i) => ({
      name: line.name.replace(/</g, "&lt;"), mode: "lines+markers",
      x: line.cells.map((cell) => cell.length), y: line.cells.map((cell) => cell.perplexity.mean),
      error_y: { type: "data", array: line.cells.map((cell) => cell.perplexity.half_width ?? 0), thickness: 1, width: 3 },
      line: { color: colours[i % colours.length], width: 2, dash: line.is_baseline ? "dash" : "solid" },
      marker: { symbol: symbols[i % symbols.length], size: 7 },
      hovertemplate: "%{x} tokens: %{y:.2f}<extra>%{fullData.name}</extra>",
    })), {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: style("--ink"), family: getComputedStyle(document.body).fontFamily, size: 12 },
      margin: { l: 10, r: 10, t: 10, b: 10 }, legend: { orientation: "h", y: -0.18 },
      xaxis: { ...axis, type: "log", tickvals: lengths, ticktext: lengths.map(String), title: { text: "tokens in the window" } },
      yaxis: { ...axis, type: "log", title: { text: "perplexity of the same tokens" }, nticks: 12 },
      shapes: [...new Set(lines.map((line) => line.trained_length))].map((x) => ({
        type: "line", x0: x, x1: x, yref: "paper", y0: 0, y1: 1, line: { color: style("--soft"), width: 1, dash: "dot" },
      })),
    }, { displayModeBar: false, responsive: true });
  }

  dark.addEventListener("change", draw);
  draw();
})();
