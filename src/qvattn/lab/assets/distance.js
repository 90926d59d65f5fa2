"use strict";
// Draws one plot a head. Text from data reaches the page as text only.
(() => {
  const runs = JSON.parse(document.getElementById("data").textContent);
  const [run, side, what] = ["run", "side", "what"].map((id) => document.getElementById(id));
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const percent = (value) => `${(100 * value).toFixed(1)} %`;
  const make = (tag, text) => Object.assign(document.createElement(tag), { textContent: text ?? "" });

  function offer() {
    const before = side.value;
    side.replaceChildren();
    for (const [place, found] of Object.entries(runs[run.value].places)) {
      for (const way of ["past", "future"]) {
        if (!found.heads.some((head) => head[way])) continue;
        const option = make("option", `${place}, ${way} keys`);
        option.value = `${place} ${way}`;
        side.append(option);
      }
    }
    if ([...side.options].some((option) => option.value === before)) side.value = before;
  }

  function facts(head, one, leftOut) {
    const list = make("dl");
    const add = (name, value) => list.append(make("dt", name), make("dd", value));
    const fit = one.fit;
    const capped = (family, text) => (fit.bounded.includes(family) ? `${text} (bound)` : text);
    add("α", capped("power", fit.alpha.toFixed(2)));
    add("λ", capped("exponential", fit.rate.toFixed(3)));
    const bar = fit.ratio.half_width === null ? "" : ` ± ${fit.ratio.half_width.toFixed(3)}`;
    add("ln L ratio a query", `${fit.ratio.mean.toFixed(3)}${bar}`);
    add("gap: power law | exponential", `${fit.gap.power.toFixed(2)} | ${fit.gap.exponential.toFixed(2)}`);
    add(`own key | ${leftOut} key`, `${percent(head.own)} | ${percent(head.left_out)}`);
    if (head.agf) add("learned AGF p", Object.values(head.agf).map((p) => p.toFixed(3)).join(" | "));
    return list;
  }

  function traces(one) {
    const ink = style("--accent"), soft = style("--soft"), key = what.value;
    const dots = { mode: "markers", marker: { size: 4, color: ink }, name: "measured" };
    if (key === "share") {
      const x = one.share.map((_, i) => i + 1);
      const line = (family, dash) => ({ x, y: one.fit.curve[family], mode: "lines", line: { color: soft, width: 1.5, dash }, name: family });
      return [{ x, y: one.share, ...dots }, line("power", "solid"), line("exponential", "dash")];
    }
    const from = key === "attention" ? 0 : 1;  // the own key would stand at distance 0, which a log axis has not
    const kept = one.distance.map((d, i) => [d + (from ? 0 : 1), one[key][i]]).filter(([d]) => d > 0);
    return [{ x: kept.map(([d]) => d), y: kept.map(([, y]) => y), ...dots }];
  }

  function draw() {
    const [place, way] = side.value.split(" ");
    const found = runs[run.value].places[place];
    const holder = document.getElementById("heads");
    holder.replaceChildren();
    const weights = ["share", "attention"].includes(what.value);
    const axis = { gridcolor: style("--line"), zerolinecolor: style("--line"), fixedrange: true, automargin: true };
    for (const head of found.heads) {
      const one = head[way];
      if (!one) continue;
      const figure = make("figure"), plot = make("div");
      plot.className = "plot";
      figure.append(make("h3", `Layer ${head.layer + 1}, head ${head.index + 1}`), plot, facts(head, one, found.left_out));
      holder.append(figure);
      const seen = traces(one)[0].y.filter((y) => y > 0);
      const low = Math.max(Math.min(...seen), 1e-6), high = Math.max(...seen);
      Plotly.newPlot(plot, traces(one), {
        paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", height: 260, showlegend: false,
        font: { color: style("--ink"), family: getComputedStyle(document.body).fontFamily, size: 11 },
        margin: { l: 10, r: 4, t: 4, b: 10 },
        xaxis: { ...axis, type: "log", dtick: 1, title: { text: what.value === "attention" ? "distance + 1" : "distance", standoff: 4 } },
        yaxis: weights
          ? { ...axis, type: "log", dtick: 1, exponentformat: "power", range: [Math.log10(low) - .2, Math.log10(high) + .2] }
          : axis,
      }, { displayModeBar: false, responsive: true });
    }
  }

  run.addEventListener("change", () => { offer(); draw(); });
  for (const control of [side, what]) control.addEventListener("change", draw);
  dark.addEventListener("change", draw);
  offer();
  draw();
})();
