"use strict";
// Residual against cache, and heat maps by layer and head.
Analyses.each("operators", (section, found, chosen) => {
  const { colour, plain, layout, axis } = Analyses;
  const measure = chosen("measure");
  const kind = (name) => name.replace(/ \d+$/, "").replace(/, \d+ groups$/, "").replace("mqa", "gqa");
  const kinds = [...new Set(found.summary.map((row) => kind(row.name)))];
  const traces = kinds.map((own, index) => {
    const rows = found.summary.filter((row) => kind(row.name) === own).sort((a, b) => a.cache - b.cache);
    const spread = rows.map((row) => row.residual[measure]);
    return {
      x: rows.map((row) => row.cache), y: spread.map((one) => one.mean), name: plain(own), mode: "lines+markers",
      line: { color: colour(index), width: 1.5, dash: rows[0].keeps_values ? "solid" : "dot" }, marker: { color: colour(index), size: 8 },
      text: rows.map((row) => plain(row.name)), customdata: spread.map((one) => [one.least, one.most]),
      hovertemplate: "%{text}: %{y:.3f} (%{customdata[0]:.2f} to %{customdata[1]:.2f}), %{x} elements<extra></extra>",
    };
  });
  const rows = found.summary.filter((row) => row.random[measure] !== undefined);
  if (rows.length) traces.push({
    x: rows.map((row) => row.cache), y: rows.map((row) => row.random[measure]), name: "random factors", mode: "markers",
    marker: { color: Analyses.style("--soft"), size: 7, symbol: "x-thin", line: { width: 1.5, color: Analyses.style("--soft") } },
    text: rows.map((row) => plain(row.name)), hovertemplate: "random, %{text}: %{y:.3f}<extra></extra>",
  });
  Plotly.react(section.querySelector(".front"), traces, layout({
    height: 420, xaxis: axis("elements cached per token and layer", { rangemode: "tozero" }),
    yaxis: axis("mean relative residual", { range: [-0.03, 1.03] }), legend: { orientation: "h", y: -0.2, font: { size: 12 } },
    margin: { l: 50, r: 8, t: 8, b: 50 },
  }), { displayModeBar: false, responsive: true });

  const name = found.summary[chosen("keys")].name;
  const layers = found.layers.filter((layer) => name in layer.cache);
  const label = (layer) => `${layer.place} ${layer.layer + 1}`;
  const most = Math.max(...found.layers.map((layer) => layer.shared.length));
  const x = Array.from({ length: most }, (_, i) => String(i + 1));
  const height = (rows) => 70 + 20 * rows.length;
  Analyses.heatmap(section.querySelector(".plot.residual"), {
    z: layers.map((layer) => layer.residuals[measure][name]), x, y: layers.map(label), zmax: 1, digits: 2, height: height(layers),
    hover: "%{y}, head %{x}: %{z:.3f}<extra></extra>",
  });
  Analyses.heatmap(section.querySelector(".plot.rank"), {
    z: found.layers.map((layer) => layer.ranks), x, y: found.layers.map(label), zmax: found.layers[0].width, digits: 0,
    height: height(found.layers), hover: "%{y}, head %{x}: %{z:.1f}<extra></extra>",
  });
});
