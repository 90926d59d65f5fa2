"use strict";
// What the scripts of analyses share: finding their sections, sorting, switches, colours. Text from data reaches a page
// as text only: plotly reads a little markup in its labels, so names go through plain() first.
const Analyses = (() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const PALETTES = {
    light: ["#0b62a8", "#c4500b", "#1f8a5b", "#a1307f", "#7a6a00", "#5b4bb7", "#b3261e", "#2a7f86"],
    dark: ["#6db1f2", "#f29b5c", "#62cf9f", "#e58ac6", "#d4c04f", "#a99cf2", "#f2877f", "#66c8cf"],
  };
  const colour = (index) => {
    const palette = PALETTES[dark.matches ? "dark" : "light"];
    return palette[index % palette.length];
  };
  const plain = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const make = (tag, text) => Object.assign(document.createElement(tag), { textContent: text ?? "" });

  function layout(extra) {
    return {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: style("--ink"), family: getComputedStyle(document.body).fontFamily, size: 12 },
      hoverlabel: { bgcolor: style("--raised"), bordercolor: style("--line"), font: { color: style("--ink") }, namelength: -1 },
      margin: { l: 10, r: 6, t: 6, b: 10 }, ...extra,
    };
  }

  function axis(title, extra) {
    return {
      title: { text: title, font: { size: 12 } }, gridcolor: style("--line"), linecolor: style("--line"), zeroline: false,
      automargin: true, fixedrange: true, ...extra,
    };
  }

  function heatmap(plot, { z, x, y, zmax, hover, height, digits }) {
    Plotly.react(plot, [{
      type: "heatmap", z, x: x.map(plain), y: y.map(plain), zmin: 0, zmax, colorscale: [[0, style("--raised")], [1, style("--accent")]],
      showscale: false, xgap: 1, ygap: 1, hovertemplate: hover, texttemplate: `%{z:.${digits ?? 0}f}`, textfont: { size: 11 },
    }], layout({
      plot_bgcolor: style("--line"), height,
      xaxis: { automargin: true, tickangle: -40, fixedrange: true, type: "category" },
      yaxis: { automargin: true, autorange: "reversed", fixedrange: true, type: "category" },
    }), { displayModeBar: false, responsive: true });
  }

  function sortable(table) {
    const heads = [...table.querySelectorAll("thead th")];
    const original = [...table.tBodies[0].rows];
    const numeric = (key) => key !== "" && !Number.isNaN(Number(key));
    heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
      const key = (row) => row.cells[column].dataset.key;
      const cycle = original.some((row) => numeric(key(row))) ? ["descending", "ascending", null] : ["ascending", "descending", null];
      const next = cycle[(cycle.indexOf(head.getAttribute("aria-sort")) + 1) % 3];
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      if (next) head.setAttribute("aria-sort", next);
      const sign = next === "ascending" ? 1 : -1;
      const rows = [...original];
      if (next) rows.sort((r, s) => {
        const [a, b] = [key(r), key(s)];
        if (a === "" || b === "") return (a === "") - (b === "");
        return sign * (numeric(a) && numeric(b) ? a - b : a.localeCompare(b, undefined, { numeric: true }));
      });
      table.tBodies[0].append(...rows);
    }));
  }

  // draw(section, data, chosen) is called at the start and after every change of a choice or of the colours;
  // chosen(name) is the index of a select, or the pressed value of a switch
  function each(kind, draw) {
    for (const section of document.querySelectorAll(`[data-analysis="${kind}"]`)) {
      const data = JSON.parse(document.getElementById(section.dataset.json).textContent);
      const chosen = (name) => {
        const choice = section.querySelector(`[data-choice=${name}]`);
        return choice ? Number(choice.value) : section.querySelector(`[data-switch=${name}] [aria-pressed=true]`).dataset.value;
      };
      const again = () => draw(section, data, chosen);
      section.querySelectorAll("table.sortable").forEach(sortable);
      section.querySelectorAll("[data-choice]").forEach((choice) => choice.addEventListener("change", again));
      for (const group of section.querySelectorAll("[data-switch]")) {
        for (const button of group.querySelectorAll("button")) {
          button.addEventListener("click", () => {
            group.querySelectorAll("button").forEach((other) => other.setAttribute("aria-pressed", String(other === button)));
            again();
          });
        }
      }
      dark.addEventListener("change", again);
      again();
    }
  }

  document.querySelectorAll('[data-analysis=""] table.sortable').forEach(sortable);
  return { each, heatmap, layout, axis, colour, plain, make, style };
})();
