"use strict";
// One plot a head: weight, score or cosine against distance.
Analyses.each("distance", (section, data, chosen) => {
  const { layout, axis, make, style } = Analyses;
  const [place, way] = data.sides[chosen("side")];
  const shown = ["share", "attention", "score", "cosine"][chosen("shown")];
  const percent = (value) => `${(100 * value).toFixed(1)} %`;
  const found = data.runs[chosen("run")].places[place];
  const holder = section.querySelector(".heads");
  holder.querySelectorAll(".plot").forEach((plot) => Plotly.purge(plot));
  holder.replaceChildren();

  function facts(head, { fit }) {
    const list = make("dl");
    const add = (name, value) => list.append(make("dt", name), make("dd", value));
    const capped = (family, text) => (fit.bounded.includes(family) ? `${text} (bound)` : text);
    const bar = fit.ratio.half_width === null ? "" : ` ± ${fit.ratio.half_width.toFixed(3)}`;
    add("α | λ", `${capped("power", fit.alpha.toFixed(2))} | ${capped("exponential", fit.rate.toFixed(3))}`);
    add("ln L ratio a query", `${fit.ratio.mean.toFixed(3)}${bar}`);
    add("gap: power | exp.", `${fit.gap.power.toFixed(2)} | ${fit.gap.exponential.toFixed(2)}`);
    add(`own | ${found.left_out} key`, `${percent(head.own)} | ${percent(head.left_out)}`);
    if (head.agf) add("learned AGF p", Object.values(head.agf).map((p) => p.toFixed(3)).join(" | "));
    return list;
  }

  function traces(one) {
    const dots = { mode: "markers", marker: { size: 4, color: style("--accent") }, name: "measured" };
    if (shown === "share") {
      const x = one.share.map((_, i) => i + 1);
      const line = (family, dash) => ({ x, y: one.fit.curve[family], mode: "lines", line: { color: style("--soft"), width: 1.5, dash }, name: family });
      return [{ x, y: one.share, ...dots }, line("power", "solid"), line("exponential", "dash")];
    }
    // the own key stands at distance 0, which a log axis has not
    const shift = shown === "attention" ? 1 : 0;
    const kept = one.distance.map((d, i) => [d + shift, one[shown][i]]).filter(([d]) => d > 0);
    return [{ x: kept.map(([d]) => d), y: kept.map(([, y]) => y), ...dots }];
  }

  for (const head of found?.heads ?? []) {
    const one = head[way];
    if (!one) continue;
    const figure = make("figure"), plot = make("div"), drawn = traces(one);
    plot.className = "plot";
    plot.style.height = "240px";
    figure.append(make("h3", `Layer ${head.layer + 1}, head ${head.index + 1}`), plot, facts(head, one));
    holder.append(figure);
    const seen = drawn[0].y.filter((y) => y > 0);
    const range = [Math.log10(Math.max(Math.min(...seen), 1e-6)) - 0.2, Math.log10(Math.max(...seen)) + 0.2];
    const logarithmic = { type: "log", exponentformat: "power", dtick: 1, range };
    Plotly.newPlot(plot, drawn, layout({
      height: 240, showlegend: false,
      xaxis: axis(shown === "attention" ? "distance + 1" : "distance", { type: "log", dtick: 1 }),
      yaxis: axis("", ["share", "attention"].includes(shown) ? logarithmic : {}),
    }), { displayModeBar: false, responsive: true });
  }
  if (!holder.children.length) holder.append(make("p", "This model has no such keys."));
});
