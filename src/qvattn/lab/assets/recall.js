"use strict";
// One dot a seed: recall of every run, by variant.
Analyses.each("recall", (section, rows) => {
  const { colour, plain, layout, axis, style } = Analyses;
  const traces = rows.map((row, index) => {
    const seeds = Object.entries(row.accuracy);
    return {
      x: seeds.map(([, value]) => 100 * value), y: seeds.map((_, i) => index + 0.16 * (i - (seeds.length - 1) / 2)), mode: "markers",
      marker: { color: colour(index), size: 9, opacity: 0.85 }, showlegend: false, text: seeds.map(([seed]) => `seed ${seed}`),
      hovertemplate: `${plain(row.name)}, %{text}: %{x:.1f} %<extra></extra>`,
    };
  });
  const plot = section.querySelector(".seeds");
  const height = 90 + 26 * rows.length;
  plot.style.height = `${height}px`;
  const chance = 100 * rows[0].chance;
  Plotly.react(plot, traces, layout({
    height, xaxis: axis("recall %", { range: [0, 102] }),
    yaxis: axis("", {
      showgrid: true, range: [rows.length - 0.5, -0.5], tickvals: rows.map((_, i) => i), ticktext: rows.map((row) => `${plain(row.name)}  `),
    }),
    shapes: [{ type: "line", x0: chance, x1: chance, yref: "paper", y0: 0, y1: 1, line: { color: style("--soft"), dash: "dot", width: 1.5 } }],
    margin: { l: 10, r: 8, t: 8, b: 44 },
  }), { displayModeBar: false, responsive: true });
});
