"use strict";
// The pictures of the page `explorer`: curves and trees as SVG, maps as canvas. Colours are variables of explorer.css.
const Draw = (() => {
  const SVG = "http://www.w3.org/2000/svg", COLOURS = 8; // of curves in explorer.css

  function svg(name, attributes = {}, ...inner) {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...inner);
    return made;
  }

  // An element of HTML: attributes, and listeners as functions.
  function html(name, attributes = {}, ...inner) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes))
      if (typeof value === "function") made.addEventListener(key, value);
      else if (value === true) made.setAttribute(key, "");
      else if (value !== false && value !== null) made.setAttribute(key, value);
    made.append(...inner);
    return made;
  }

  // Round numbers that divide a range into about `count` steps.
  function ticks(low, high, count) {
    const rough = (high - low) / count, power = Math.pow(10, Math.floor(Math.log10(rough)));
    const step = [1, 2, 5, 10].map(factor => factor * power).find(one => one >= rough * 0.75);
    const found = [];
    for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-9; at += step) found.push(Math.abs(at) < step / 1e6 ? 0 : at);
    return found;
  }

  const short = value => Math.abs(value) >= 1e5 || (value && Math.abs(value) < 1e-3)
    ? value.toExponential(0).replace("e+", "e") : String(Number(value.toPrecision(4)));

  // A chart of curves [{name, x, y}] over x. `logarithmic` y takes log10, with powers of ten as ticks; `power` x are exponents of 2.
  function curves(lines, { label, xLabel, yLabel, logarithmic = false, power = false, width }) {
    const height = Math.min(300, Math.max(220, width * 0.5)), [left, right, top, bottom] = [60, 22, 10, 40];
    const scaled = lines.map(line => ({ ...line, y: logarithmic ? line.y.map(value => Math.log10(Math.max(value, 1e-17))) : line.y }));
    const finite = scaled.flatMap(line => line.y).filter(Number.isFinite), every = scaled.flatMap(line => line.x);
    let [low, high] = [Math.min(...finite), Math.max(...finite)];
    if (high - low < 1e-9) [low, high] = [low - 1, high + 1];
    const [start, end] = [Math.min(...every), Math.max(...every)], margin = (high - low) * 0.04;
    const across = value => left + (value - start) / (end - start || 1) * (width - left - right);
    const down = value => height - bottom - (value - low + margin) / (high - low + 2 * margin) * (height - top - bottom);
    const chart = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label, class: "chart" });
    for (const at of ticks(low, high, logarithmic ? 6 : 5)) {
      if (logarithmic && at !== Math.round(at)) continue;
      chart.append(svg("line", { x1: left, x2: width - right, y1: down(at), y2: down(at), class: "grid" }),
        svg("text", { x: left - 6, y: down(at) + 4, "text-anchor": "end" }, logarithmic ? `1e${at}` : short(at)));
    }
    for (const at of ticks(start, end, Math.max(3, Math.floor(width / 90))))
      chart.append(svg("text", { x: across(at), y: height - bottom + 16, "text-anchor": "middle" }, power ? `2^${short(at)}` : short(at)));
    chart.append(svg("text", { x: (left + width - right) / 2, y: height - 5, "text-anchor": "middle" }, xLabel),
      svg("text", { x: 12, y: (height - bottom) / 2, transform: `rotate(-90 12 ${(height - bottom) / 2})`, "text-anchor": "middle" }, yLabel));
    scaled.forEach((line, n) => {
      const points = line.x.map((value, i) => Number.isFinite(line.y[i]) ? `${across(value).toFixed(1)},${down(line.y[i]).toFixed(1)}` : null);
      const path = svg("polyline", { points: points.filter(Boolean).join(" "), class: `curve c${(line.colour ?? n) % COLOURS}` });
      path.append(svg("title", {}, line.name));
      chart.append(path);
    });
    return chart;
  }

  const legend = lines => html("ul", { class: "legend" }, ...lines.map((line, n) =>
    html("li", {}, svg("svg", { width: 28, height: 10, "aria-hidden": "true" },
      svg("line", { x1: 1, x2: 27, y1: 5, y2: 5, class: `curve c${(line.colour ?? n) % COLOURS}` })), line.name)));

  // The colour of a number from -1 (blue) over 0 (white) to 1 (red), as [r, g, b].
  function colour(value) {
    const depth = Math.min(Math.abs(value), 1), to = value < 0 ? [33, 102, 172] : [178, 24, 43];
    return to.map(channel => Math.round(247 + (channel - 247) * depth));
  }

  // What brings numbers to colours, and their legend: around zero if some are negative, else from the smallest to the largest.
  function colours(values) {
    const low = Math.min(...values), high = Math.max(...values), largest = Math.max(-low, high, 1e-12), signed = low < 0;
    const of = value => colour(signed ? value / largest : (value - low) / (high - low || 1));
    const ramp = html("span", { class: signed ? "ramp signed" : "ramp", "aria-hidden": "true" });
    return { of, scale: html("p", { class: "scale" }, `${short(signed ? -largest : low)} `, ramp, ` ${short(signed ? largest : high)}`) };
  }

  // A map of numbers [row][column] with the offset zero in its middle.
  function heat(rows, { label, width }) {
    const values = rows.flat(), { of, scale } = colours(values), count = rows.length;
    const canvas = html("canvas", { width: count, height: count, role: "img", "aria-label": label, class: "map", style: `width:${width}px;height:${width}px` });
    const context = canvas.getContext("2d"), image = context.createImageData(count, count);
    values.forEach((value, i) => image.data.set([...of(value), 255], 4 * i));
    context.putImageData(image, 0, 0);
    return html("div", {}, canvas, scale);
  }

  // A tree of nodes as paths of branches, coloured by numbers; a click or Enter chooses a node.
  function tree(paths, values, chosen, choose, { label, width }) {
    const depth = Math.max(...paths.map(path => path.length)), branches = 1 + Math.max(...paths.join("").split("").map(Number));
    const place = path => [...path].reduce(([left, size], branch) => [left + size / branches * branch, size / branches], [0, 1]);
    const x = path => 14 + (place(path)[0] + place(path)[1] / 2) * (width - 28), y = path => 20 + path.length * 55;
    const drawn = svg("svg", { viewBox: `0 0 ${width} ${depth * 55 + 44}`, width, height: depth * 55 + 44, role: "group", "aria-label": label, class: "chart" });
    for (const path of paths)
      if (path) drawn.append(svg("line", { x1: x(path), y1: y(path), x2: x(path.slice(0, -1)), y2: y(path.slice(0, -1)), class: "grid" }));
    const { of, scale } = colours(values), radius = Math.min(11, (width - 28) / Math.pow(branches, depth) / 2.2);
    paths.forEach((path, n) => {
      const name = path ? `node ${[...path].join(" ")}` : "root";
      const node = svg("circle", { cx: x(path), cy: y(path), r: radius, fill: `rgb(${of(values[n])})`, tabindex: 0,
        role: "button", "aria-label": `${name}: ${short(values[n])}`, "aria-pressed": n === chosen, class: n === chosen ? "node chosen" : "node" });
      node.append(svg("title", {}, `${name}: ${short(values[n])}`));
      node.addEventListener("click", () => choose(n));
      node.addEventListener("keydown", event => ["Enter", " "].includes(event.key) && (event.preventDefault(), choose(n)));
      drawn.append(node);
    });
    return html("div", {}, drawn, scale);
  }

  return { curves, heat, html, legend, tree };
})();
