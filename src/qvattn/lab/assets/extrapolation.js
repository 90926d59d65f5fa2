"use strict";
// Perplexity against the tokens in the window, a line a variant.
Analyses.each("extrapolation", (section, lines) => {
  const { layout, axis, colour, plain, style } = Analyses;
  const symbols = ["circle", "square", "diamond", "triangle-up", "x", "cross", "star", "triangle-down", "hexagon", "pentagon"];
  const lengths = lines[0].cells.map((cell) => cell.length);
  Plotly.react(section.querySelector(".curves"), lines.map((line, index) => ({
    name: plain(line.name), mode: "lines+markers", x: lengths, y: line.cells.map((cell) => cell.perplexity.mean),
    error_y: { type: "data", array: line.cells.map((cell) => cell.perplexity.half_width ?? 0), thickness: 1, width: 3 },
    line: { color: colour(index), width: 2, dash: index < 8 ? "solid" : "dash" },
    marker: { symbol: symbols[index % symbols.length], size: 7, color: colour(index) },
    hovertemplate: "%{x} tokens: %{y:.2f}",
  })), layout({
    height: 480, legend: { orientation: "h", y: -0.16, font: { size: 12 } }, margin: { l: 10, r: 10, t: 10, b: 60 },
    xaxis: axis("tokens in the window", { type: "log", tickvals: lengths, ticktext: lengths.map(String) }),
    yaxis: axis("perplexity of the same tokens", { type: "log", nticks: 12 }),
    shapes: [...new Set(lines.map((line) => line.trained_length))].map((x) => ({
      type: "line", x0: x, x1: x, yref: "paper", y0: 0, y1: 1, line: { color: style("--soft"), width: 1, dash: "dot" },
    })),
  }), { displayModeBar: false, responsive: true });
});
