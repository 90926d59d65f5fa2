"use strict";
// Heat maps of what each head matches, and one dot a head: spread against separation.
Analyses.each("diffusion", (section, data, chosen) => {
  const { colour, plain, layout, axis } = Analyses;
  const symbols = { encoder: "circle", decoder: "square", cross: "diamond" };

  function best(head) {
    const own = Object.values(head.separation).filter((one) => one.choose && one.report);
    if (!own.length) return null;
    return own.reduce((a, b) => (b.choose.auc > a.choose.auc ? b : a)).report.auc;
  }

  function scatter() {
    const traces = [];
    data.names.forEach((name, index) => {
      Object.keys(symbols).forEach((place, order) => {
        const heads = data.runs.filter((run) => run.name === name).flatMap((run) =>
          run.places[place].heads.map((head) => ({ head, run })).filter(({ head }) => best(head) !== null));
        traces.push({
          x: heads.map(({ head }) => head.query.groups), y: heads.map(({ head }) => best(head)), mode: "markers",
          name: plain(`${name}, ${place}`), marker: { color: colour(index), symbol: symbols[place], size: 7, opacity: 0.75 },
          text: heads.map(({ head, run }) => `seed ${run.seed}, layer ${head.layer + 1}, head ${head.index + 1}`),
          hovertemplate: "%{text}: %{x:.2f} groups, AUC %{y:.3f}", legendgroup: String(order),
        });
      });
    });
    Plotly.react(section.querySelector(".scatter"), traces, layout({
      height: 420, xaxis: axis("feature groups that a query answers to"), yaxis: axis("AUC of what the head separates best"),
      legend: { orientation: "h", y: -0.18, font: { size: 11 } }, margin: { l: 50, r: 8, t: 8, b: 50 },
    }), { displayModeBar: false, responsive: true });
  }

  const run = data.runs[chosen("run")];
  const heads = run.places[chosen("place")].heads;
  const y = heads.map((head) => `${head.layer + 1}.${head.index + 1}`);
  const height = 90 + 28 * heads.length;
  for (const side of ["query", "key"]) {
    Analyses.heatmap(section.querySelector(`.plot.${side}`), {
      z: heads.map((head) => head[side].shares.map((share) => 100 * share)), x: run.groups, y, zmax: 100, height,
      hover: "head %{y}, %{x}: %{z:.1f} %<extra></extra>",
    });
  }
  const relations = ["head", "modifiers", "partner"].filter((relation) => heads.some((head) => head.separation[relation]));
  Analyses.heatmap(section.querySelector(".plot.auc"), {
    z: relations.map((relation) => heads.map((head) => 100 * (head.separation[relation]?.report?.auc ?? 0))), x: y, y: relations,
    zmax: 100, height: 70 + 34 * relations.length, hover: "head %{x}, %{y}: AUC %{z:.1f} %<extra></extra>",
  });
  scatter();
});
