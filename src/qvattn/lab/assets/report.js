"use strict";
// Sorts the tables and draws the pictures. Text from data reaches the page as text only: plotly reads a little
// markup in its labels, so every name goes through plain() first.
(() => {
  const PALETTES = {
    light: ["#0b62a8", "#c4500b", "#1f8a5b", "#a1307f", "#7a6a00", "#5b4bb7", "#b3261e", "#2a7f86", "#6b6f76", "#8a5a2b"],
    dark: ["#6db1f2", "#f29b5c", "#62cf9f", "#e58ac6", "#d4c04f", "#a99cf2", "#f2877f", "#66c8cf", "#a9adb5", "#cfa06c"],
  };
  const DASHES = ["solid", "dash", "dot"];
  const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "cross", "star"];
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const narrow = () => innerWidth < 760;
  const colour = (index) => {
    const palette = PALETTES[dark.matches ? "dark" : "light"];
    return palette[index % palette.length];
  };
  const faint = (hex) => {
    const part = (start) => parseInt(hex.slice(start, start + 2), 16);
    return `rgba(${part(1)},${part(3)},${part(5)},0.16)`;
  };
  const dash = (index) => DASHES[Math.floor(index / PALETTES.light.length) % DASHES.length];
  const plain = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  // breaks long names between words, so that labels leave room for the picture
  const folded = (text, width) => {
    const lines = [""];
    for (const word of text.split(" ")) {
      const last = lines[lines.length - 1];
      if (last && last.length + word.length >= width) lines.push(word);
      else lines[lines.length - 1] = last ? `${last} ${word}` : word;
    }
    return lines.map((line) => plain(line.length > 2 * width ? `${line.slice(0, 2 * width)}…` : line)).join("<br>");
  };
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function layout(xTitle, yTitle) {
    const axis = (title) => ({
      title: { text: title, font: { size: 13 } }, gridcolor: style("--line"), linecolor: style("--line"),
      zeroline: false, automargin: true, tickfont: { size: 12 },
    });
    return {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: style("--ink"), family: getComputedStyle(document.body).fontFamily, size: 13 },
      margin: { l: 50, r: 12, t: 8, b: 44 }, xaxis: axis(xTitle), yaxis: axis(yTitle),
      hoverlabel: { bgcolor: style("--raised"), bordercolor: style("--line"), font: { color: style("--ink") }, namelength: -1 },
      legend: { orientation: "h", yref: "container", y: 0, yanchor: "bottom", x: 0, font: { size: 12 }, itemwidth: 30 },
    };
  }

  function errorBars(points, name) {
    const bars = points.map((point) => point.error ?? 0);
    return bars.some((bar) => bar > 0) ? { [name]: { type: "data", array: bars, thickness: 1.5, width: 5 } } : {};
  }

  function curves(data, metric) {
    const traces = [];
    for (const line of data.curves[metric].lines) {
      const group = String(line.index);
      if (line.low.length) {
        traces.push({
          x: [...line.x, ...line.x.toReversed()], y: [...line.high, ...line.low.toReversed()], fill: "toself",
          fillcolor: faint(colour(line.index)), line: { width: 0 }, mode: "lines", hoverinfo: "skip",
          showlegend: false, legendgroup: group,
        });
      }
    }
    for (const line of data.curves[metric].lines) {
      traces.push({
        x: line.x, y: line.y, name: folded(data.names[line.index], 26), legendgroup: String(line.index),
        mode: line.x.length < 3 ? "lines+markers" : "lines",
        line: { color: colour(line.index), width: 2, dash: dash(line.index) },
        hovertemplate: "%{y:.2f}",
      });
    }
    const shape = layout("step", data.curves[metric].label);
    shape.hovermode = narrow() ? "closest" : "x unified";
    return { traces, shape, rows: data.curves[metric].lines.length };
  }

  function pareto(data) {
    const { points, front } = data.pareto;
    // markers at one place are set apart by a little, else their bars cover each other; what hovers shows is exact
    const apart = 0.014 * Math.max(...points.map((point) => point.x));
    const place = (point) => {
      const same = points.filter((other) => other.x === point.x);
      return point.x + apart * (same.indexOf(point) - (same.length - 1) / 2);
    };
    const traces = [{
      x: front.map((i) => place(points[i])), y: front.map((i) => points[i].y), mode: "lines", hoverinfo: "skip",
      line: { color: style("--soft"), width: 1.5, dash: "dot" }, showlegend: false,
    }];
    for (const point of points) {
      traces.push({
        x: [place(point)], y: [point.y], name: folded(data.names[point.index], 26), mode: "markers", ...errorBars([point], "error_y"),
        marker: { color: colour(point.index), size: 11, symbol: SYMBOLS[point.index % SYMBOLS.length] },
        hovertemplate: `${point.x} elements, %{y:.2f} %`,
      });
    }
    const shape = layout("elements cached per token and layer", "validation token accuracy %");
    shape.xaxis.rangemode = "tozero";
    return { traces, shape, rows: points.length };
  }

  function differences(data) {
    const points = data.differences.toReversed();
    const traces = points.map((point) => ({
      x: [point.y], y: [point.index], mode: "markers", ...errorBars([point], "error_x"),
      marker: { color: colour(point.index), size: 11, symbol: SYMBOLS[point.index % SYMBOLS.length] },
      showlegend: false, hovertemplate: `${plain(data.names[point.index])}: %{x:+.2f}<extra></extra>`,
    }));
    const shape = layout("percentage points", "");
    shape.yaxis = {
      ...shape.yaxis, showgrid: false, autorange: false, range: [Math.max(...points.map((p) => p.index)) + 0.6, Math.min(...points.map((p) => p.index)) - 0.6],
      tickvals: points.map((p) => p.index), ticktext: points.map((p) => `${folded(data.names[p.index], narrow() ? 14 : 22)}  `),
    };
    shape.shapes = [{ type: "line", x0: 0, x1: 0, yref: "paper", y0: 0, y1: 1, line: { color: style("--soft"), width: 1.5 } }];
    return { traces, shape, rows: 0 };
  }

  function draw(figure, picture) {
    const plot = figure.querySelector(".plot");
    const inner = narrow() ? 300 : figure.classList.contains("wide") ? 380 : 340;
    // the legend stands below the picture; give it the room that its names need
    const perLine = Math.max(1, Math.floor(figure.clientWidth / 190));
    const height = inner + 21 * Math.ceil(picture.rows / perLine);
    plot.style.height = `${height}px`;
    picture.shape.height = height;
    picture.shape.margin.b = 48 + (picture.rows ? 14 + 21 * Math.ceil(picture.rows / perLine) : 0);
    return Plotly.react(plot, picture.traces, picture.shape, { displayModeBar: false, responsive: true });
  }

  function setUp(figures, data) {
    const metric = () => figures.querySelector("[data-metric][aria-pressed=true]").dataset.metric;
    const makers = { curves: () => curves(data, metric()), pareto: () => pareto(data), differences: () => differences(data) };
    const present = {
      curves: Object.values(data.curves).some((curve) => curve.lines.length),
      pareto: data.pareto.points.length > 0, differences: data.differences.length > 0,
    };
    for (const figure of figures.querySelectorAll("figure")) if (!present[figure.dataset.picture]) figure.remove();
    const all = () => figures.querySelectorAll("figure").forEach((figure) => draw(figure, makers[figure.dataset.picture]()));
    const buttons = [...figures.querySelectorAll("[data-metric]")];
    for (const button of buttons) {
      if (!data.curves[button.dataset.metric].lines.length) button.remove();
      button.addEventListener("click", () => {
        buttons.forEach((other) => other.setAttribute("aria-pressed", String(other === button)));
        draw(button.closest("figure"), makers.curves());
      });
    }
    const left = buttons.filter((button) => button.isConnected);
    if (left.length && !left.some((button) => button.ariaPressed === "true")) left[0].setAttribute("aria-pressed", "true");
    all();
    return all;
  }

  function sortable(table) {
    const heads = [...table.querySelectorAll("thead th")];
    const body = table.tBodies[0];
    const original = [...body.rows];
    const compare = (a, b) => {
      const [x, y] = [Number(a), Number(b)];
      return Number.isNaN(x) || Number.isNaN(y) ? a.localeCompare(b, undefined, { numeric: true }) : x - y;
    };
    heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
      // numbers: largest first; then smallest first; then the order that the table came in
      const numeric = original.some((row) => row.cells[column].dataset.key !== "" && !Number.isNaN(Number(row.cells[column].dataset.key)));
      const cycle = numeric ? ["descending", "ascending", null] : ["ascending", "descending", null];
      const next = cycle[(cycle.indexOf(head.getAttribute("aria-sort")) + 1) % 3];
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      if (next) head.setAttribute("aria-sort", next);
      const rows = [...original];
      if (next) rows.sort((r, s) => {
        const [a, b] = [r.cells[column].dataset.key, s.cells[column].dataset.key];
        if (a === "" || b === "") return (a === "") - (b === "");
        return next === "ascending" ? compare(a, b) : -compare(a, b);
      });
      body.append(...rows);
    }));
  }

  // tables of analyses are sorted by their own script
  [...document.querySelectorAll("table.sortable")].filter((table) => !table.closest("[data-analysis]")).forEach(sortable);
  const pictures = JSON.parse(document.getElementById("pictures").textContent);
  const redraw = [...document.querySelectorAll(".figures")].map((figures) => setUp(figures, pictures[figures.dataset.experiment]));
  dark.addEventListener("change", () => redraw.forEach((all) => all()));
  let width = innerWidth;
  addEventListener("resize", () => {
    if (Math.abs(innerWidth - width) < 40) return;
    width = innerWidth;
    redraw.forEach((all) => all());
  });
})();
