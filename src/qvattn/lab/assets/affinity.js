"use strict";
// One heat map a head: attention between word classes.
Analyses.each("affinity", (section, runs, chosen) => {
  const percent = (value) => `${(100 * value).toFixed(1)} %`;
  const { make } = Analyses;

  function facts(head) {
    const list = make("dl");
    const add = (name, value) => list.append(make("dt", name), make("dd", value));
    const named = { head: "finds the modified word", modifiers: "finds its modifiers", partner: "finds its translation" };
    for (const [key, name] of Object.entries(named)) {
      if (head[key]) add(name, `${percent(head[key].all.accuracy)}, mass ${percent(head[key].all.mass)}`);
    }
    if (!Object.keys(head.pairs).length) return list;
    const pair = (kind) => ["fits", "misfits"].map((fit) => head.pairs[`${kind} ${fit}`]);
    const both = (kind) => pair(kind).map((one) => (one ? percent(one.mass) : "–")).join(" | ");
    add("mass on it: fits | misfits", both("head"));
    add("on others of its class: fits | misfits", both("rival"));
    return list;
  }

  const run = runs[chosen("run")];
  const holder = section.querySelector(".heads");
  holder.replaceChildren();
  for (const head of run.places[chosen("place")].heads) {
    const figure = make("figure");
    const plot = make("div");
    plot.className = "plot";
    figure.append(make("h3", `Layer ${head.layer + 1}, head ${head.index + 1}`), plot, facts(head));
    holder.append(figure);
    Analyses.heatmap(plot, {
      z: head.table.map((row) => row.map((value) => 100 * value)), x: [...run.classes, "other"], y: run.classes,
      zmax: 100, height: 280, hover: "%{y} to %{x}: %{z:.1f} %<extra></extra>",
    });
  }
});
