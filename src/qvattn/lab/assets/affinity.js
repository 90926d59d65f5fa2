"use strict";
// Sorts the table and draws one heat map a head. Text from data reaches the page as text only.
(() => {
  const runs = JSON.parse(document.getElementById("data").textContent);
  const choice = document.getElementById("run");
  const buttons = [...document.querySelectorAll("[data-place]")];
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const percent = (value) => `${(100 * value).toFixed(1)} %`;
  const make = (tag, text) => Object.assign(document.createElement(tag), { textContent: text ?? "" });

  function facts(head) {
    const list = make("dl");
    const add = (name, value) => list.append(make("dt", name), make("dd", value));
    const named = { head: "finds the modified word", modifiers: "finds its modifiers", partner: "finds its translation" };
    for (const [key, name] of Object.entries(named)) {
      if (head[key]) add(name, `${percent(head[key].all.accuracy)}, mass ${percent(head[key].all.mass)}`);
    }
    const pair = (kind) => ["fits", "misfits"].map((fit) => head.pairs[`${kind} ${fit}`]);
    const both = (kind) => pair(kind).map((one) => (one ? percent(one.mass) : "–")).join(" | ");
    add("mass on it: fits | misfits", both("head"));
    add("on others of its class: fits | misfits", both("rival"));
    return list;
  }

  function draw() {
    const run = runs[choice.value];
    const place = buttons.find((button) => button.getAttribute("aria-pressed") === "true").dataset.place;
    const columns = [...run.classes, "other"];
    const holder = document.getElementById("heads");
    holder.replaceChildren();
    const low = style("--raised"), high = style("--accent");
    for (const head of run.places[place].heads) {
      const figure = make("figure");
      const plot = make("div");
      plot.className = "plot";
      figure.append(make("h3", `Layer ${head.layer + 1}, head ${head.index + 1}`), plot, facts(head));
      holder.append(figure);
      Plotly.newPlot(plot, [{
        type: "heatmap", z: head.table.map((row) => row.map((value) => 100 * value)), x: columns, y: run.classes,
        zmin: 0, zmax: 100, colorscale: [[0, low], [1, high]], showscale: false, xgap: 1, ygap: 1,
        hovertemplate: "%{y} to %{x}: %{z:.1f} %<extra></extra>", texttemplate: "%{z:.0f}", textfont: { size: 11 },
      }], {
        paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: style("--line"), height: 280,
        font: { color: style("--ink"), family: getComputedStyle(document.body).fontFamily, size: 11 },
        margin: { l: 10, r: 4, t: 4, b: 10 }, xaxis: { automargin: true, tickangle: -40, fixedrange: true },
        yaxis: { automargin: true, autorange: "reversed", fixedrange: true },
      }, { displayModeBar: false, responsive: true });
    }
  }

  function sortable(table) {
    const heads = [...table.querySelectorAll("thead th")];
    const original = [...table.tBodies[0].rows];
    heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
      const next = { descending: "ascending", ascending: null }[head.getAttribute("aria-sort") ?? ""];
      const order = next === undefined ? "descending" : next;
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      if (order) head.setAttribute("aria-sort", order);
      const sign = order === "ascending" ? 1 : -1;
      const rows = [...original];
      const key = (row) => row.cells[column].dataset.key;
      if (order) rows.sort((r, s) => {
        const [a, b] = [key(r), key(s)];
        if (a === "" || b === "") return (a === "") - (b === "");
        return sign * (Number.isNaN(Number(a)) ? a.localeCompare(b, undefined, { numeric: true }) : a - b);
      });
      table.tBodies[0].append(...rows);
    }));
  }

  document.querySelectorAll("table.sortable").forEach(sortable);
  choice.addEventListener("change", draw);
  for (const button of buttons) {
    button.addEventListener("click", () => {
      buttons.forEach((other) => other.setAttribute("aria-pressed", String(other === button)));
      draw();
    });
  }
  dark.addEventListener("change", draw);
  draw();
})();
