"use strict";
// The page `explorer`: what a reader has chosen, the controls, and the four parts that are drawn anew after each change.
const Explorer = (() => {
  const { html, legend } = Draw;
  const START = { name: "rope", size: 64, variant: 0, base: null, kind: null, decay: null };
  const MOST = 4, SAMPLES = 400, NEAR = 8, MAP_REACH = 24, TREE_DEPTH = { 2: 4, 3: 3 };
  const RULES = { linear: "position interpolation", dynamic: "NTK-aware", yarn: "YaRN", longrope: "LongRoPE", llama3: "Llama 3", dype: "DyPE at time 1",
    drop: "DroPE" };
  const state = {
    schemes: [{ ...START }, { ...START, name: "permuteformer" }],
    head: "0", content: "mean", axis: "0", reach: "64", extended: "0", rule: "none", factor: "8", trained: "4096", node: 0,
  };
  const part = id => document.getElementById(`explorer-${id}`);

  // A choice with everything that it leaves open: the numbers of tools/explorer.py that it stands for.
  function resolve(choice) {
    const entry = CATALOGUE.schemes[choice.name], variant = entry.variants[choice.variant] ?? entry.variants[0];
    const sizes = Object.keys(variant.sizes).map(Number);
    const width = sizes.reduce((best, size) => Math.abs(size - choice.size) < Math.abs(best - choice.size) ? size : best);
    const kind = entry.kinds.includes(choice.kind) ? choice.kind : variant.kind;
    const decay = entry.decays.includes(kind) && choice.decay in CATALOGUE.rates ? choice.decay : variant.decay;
    const base = variant.ruled && choice.base ? choice.base : entry.base;
    const named = { ...variant.options, ...(base !== entry.base && { base }), ...(decay !== variant.decay && { decay }), ...(kind !== variant.kind && { attention: kind }) };
    const label = [choice.name, width, ...Object.entries(named).map(([key, value]) => `${key}=${value}`)].join(" ");
    return { name: choice.name, entry, variant, sizes, width, size: variant.sizes[width], kind, decay, base, named, label };
  }

  const heads = () => state.head === "all" ? [...Array(CATALOGUE.heads).keys()] : [Number(state.head)];

  // The score of linear attention, or the logit of softmax attention, at an offset [coordinate]: a mean over the heads shown.
  function score(scheme, rule = null) {
    const kernels = heads().map(head => {
      const kernel = Numbers.kernel(scheme.size, head, scheme.base, rule, state.content), rate = CATALOGUE.rates[scheme.decay][head];
      if (scheme.kind === "linear") return offset => kernel(offset) * Math.exp(-rate * Math.abs(offset[0]));
      const scale = Math.sqrt(scheme.size.features);
      return offset => scale * kernel(offset) + Numbers.bias(scheme.variant.bias, head, offset[0]) - rate * Math.abs(offset[0]);
    });
    return offset => kernels.reduce((sum, kernel) => sum + kernel(offset), 0) / kernels.length;
  }

  const literal = value => typeof value === "boolean" ? (value ? "True" : "False") : JSON.stringify(value);

  // The lines of Python that build a scheme, extended by the chosen rule where it applies, and call it.
  function code(scheme) {
    const options = Object.entries(scheme.named).map(([key, value]) => `, ${key}=${literal(value)}`).join("");
    const lines = ["import isopos", "import torch", "", `scheme = isopos.${scheme.entry.function}(${scheme.width}, ${CATALOGUE.heads}${options})`];
    if (scheme.variant.rules.includes(state.rule)) {
      const pairs = scheme.size.blocks.filter(block => block.extends).map(block => Numbers.frequencies(block, 0, scheme.base, null)[0].length);
      const orders = scheme.size.blocks.filter(block => block.extends).map(block => block.kind === "jordan" ? block.features / 2 : null);
      const factors = `, rescale=${JSON.stringify(Numbers.rescale(Number(state.factor), orders[0] ?? pairs[0])).replaceAll(",", ", ")}`;
      lines.push(`scheme.extend("${state.rule}", factor=${state.factor}, trained=${state.trained}${state.rule === "longrope" ? factors : ""})`);
    }
    const embedding = scheme.name === "sinusoidal";
    if (embedding) lines.push(`tokens = torch.randn(1, 64, ${4 * scheme.width}) + scheme.embedding(isopos.sequence(64))`);
    lines.push("x = scheme.group.arrange(64)  # positions of 64 tokens",
      `q, k = torch.randn(2, 1, ${CATALOGUE.heads}, 64, scheme.encoding.features)`,
      `v = torch.randn(1, ${CATALOGUE.heads}, 64, ${scheme.width})`, "y = scheme(q, k, v, x, causal=True)");
    return lines.join("\n");
  }

  // A labelled choice among options {value: text}; `change` takes the value.
  function select(id, text, options, value, change) {
    const list = html("select", { id, change: event => change(event.target.value) });
    for (const [key, shown] of Object.entries(options)) list.append(html("option", { value: key, selected: key === String(value) }, shown));
    return field(id, text, list);
  }

  const field = (id, text, control) => html("div", {}, html("label", { for: id }, text), control);

  const same = values => Object.fromEntries(values.map(value => [value, String(value)]));
  const optionText = options => Object.entries(options).map(([key, value]) => `${key}=${value}`).join(", ") || "defaults";

  function card(choice, n) {
    const scheme = resolve(choice), { entry, variant } = scheme, id = key => `explorer-${key}-${n}`;
    const set = key => value => change(() => { choice[key] = ["size", "variant"].includes(key) ? Number(value) : value; });
    const names = same(Object.keys(CATALOGUE.schemes));
    const fields = [
      select(id("name"), "scheme", names, choice.name, name => change(() => Object.assign(choice, START, { name, size: choice.size }))),
      select(id("size"), "head size", same(scheme.sizes), scheme.width, set("size")),
    ];
    if (entry.variants.length > 1)
      fields.push(select(id("variant"), "options", Object.fromEntries(entry.variants.map((one, i) => [i, optionText(one.options)])), choice.variant, set("variant")));
    if (variant.ruled) {
      const typed = event => {
        const base = Number(event.target.value);
        if (base > 1 && base < 1e12) change(() => { choice.base = base; });
        else event.target.setAttribute("aria-invalid", "true");
      };
      fields.push(field(id("base"), "base", html("input", { id: id("base"), type: "text", inputmode: "decimal", value: scheme.base, change: typed })));
    }
    if (entry.kinds.length > 1) fields.push(select(id("kind"), "attention", same(entry.kinds), scheme.kind, set("kind")));
    if (entry.decays.includes(scheme.kind)) fields.push(select(id("decay"), "decay", same(Object.keys(CATALOGUE.rates)), scheme.decay, set("decay")));
    if (state.schemes.length > 1)
      fields.push(html("button", { type: "button", "aria-label": `Remove ${scheme.label}`, click: () => change(() => state.schemes.splice(n, 1)) }, "Remove"));
    return html("fieldset", {}, html("legend", {}, `${n + 1}: ${scheme.label}`), html("div", { class: "controls" }, ...fields),
      html("p", { class: "note" }, `${entry.summary}. ${entry.equation}. ${variant.note}`));
  }

  function choices() {
    const set = key => value => change(() => { state[key] = value; });
    const add = html("button", { type: "button", id: "explorer-add", disabled: state.schemes.length >= MOST,
      click: () => change(() => state.schemes.push({ ...START, name: "ape-grid" })) }, "Add a scheme");
    const all = Object.fromEntries([...Array(CATALOGUE.heads).keys()].map(head => [head, `${head + 1} of ${CATALOGUE.heads}`]));
    part("choices").replaceChildren(...state.schemes.map(card), add, html("fieldset", {}, html("legend", {}, "What is drawn"), html("div", { class: "controls" },
      select("explorer-content", "query and key", { mean: "mean over q = k", same: "a fixed q = k", other: "a fixed q and another k" }, state.content, set("content")),
      select("explorer-head", "head", { ...all, all: "mean" }, state.head, set("head")),
      select("explorer-reach", "farthest offset", same([16, 64, 256, 1024, 4096, 16384]), state.reach, set("reach")),
      select("explorer-axis", "axis of curves", { 0: "1", 1: "2", 2: "3" }, state.axis, set("axis")))));
  }

  // Offsets of a curve: earlier keys as distances, or both sides where the direction matters.
  function offsets() {
    const reach = Number(state.reach), both = state.content === "other", span = both ? 2 * reach : reach;
    const count = Math.min(span, SAMPLES);
    return Array.from({ length: count + 1 }, (_, i) => Math.round(i * span / count) - (both ? reach : 0));
  }

  function at(axis, value) {
    const offset = [0, 0, 0];
    offset[axis] = value;
    return offset;
  }

  const isTree = scheme => scheme.variant.coordinates.some(one => one.kind === "tree");
  const columns = scheme => scheme.variant.coordinates.flatMap((one, n, all) =>
    one.kind === "tree" ? [] : [{ ...one, column: n + all.slice(0, n).filter(other => other.kind === "tree").length }]);

  function kernels(schemes, width) {
    const x = offsets(), both = state.content === "other", drawn = [];
    for (const kind of ["linear", "softmax"]) {
      const lines = schemes.flatMap((scheme, colour) => {
        const column = columns(scheme)[Number(state.axis)]?.column;
        if (scheme.kind !== kind || column === undefined) return [];
        const value = score(scheme);
        return [{ name: scheme.label, colour, x, y: x.map(t => value(at(column, both ? t : -t))) }];
      });
      if (!lines.length) continue;
      const what = kind === "linear" ? "score" : "logit";
      drawn.push(Draw.curves(lines, { width, xLabel: both ? "offset, key minus query" : "distance to an earlier key", yLabel: what,
        label: `${what} by ${both ? "offset" : "distance"} on axis ${Number(state.axis) + 1}: ${lines.map(line => line.name).join(", ")}` }), legend(lines));
    }
    const maps = schemes.filter(scheme => columns(scheme).length > 1).map(scheme => map(scheme, width));
    const trees = schemes.filter(isTree).map(scheme => tree(scheme, width));
    part("kernels").replaceChildren(...drawn, html("div", { class: "maps" }, ...maps), ...trees);
  }

  function map(scheme, width) {
    const value = score(scheme), reach = Math.min(Number(state.reach), MAP_REACH), all = columns(scheme);
    const first = Number(state.axis) % all.length, [down, across] = [all[first].column, all[(first + 1) % all.length].column];
    const span = Array.from({ length: 2 * reach + 1 }, (_, i) => i - reach);
    const rows = span.map(y => span.map(x => {
      const offset = at(down, y);
      offset[across] = x;
      return value(offset);
    }));
    const text = `${scheme.label}: axis ${first + 1} down and axis ${(first + 1) % all.length + 1} across, ${-reach} to ${reach}`;
    return html("figure", {}, html("figcaption", {}, text), Draw.heat(rows, { width: Math.min(width, 224), label: `Map of ${text}` }));
  }

  // All nodes of a tree down to a depth, as paths of branches, each after its parent.
  function paths(branches) {
    const found = [""], depth = TREE_DEPTH[branches] ?? 2;
    for (const path of found) if (path.length < depth) found.push(...[...Array(branches).keys()].map(branch => path + branch));
    return found;
  }

  function tree(scheme, width) {
    const { branches } = scheme.variant.coordinates.find(one => one.kind === "tree"), nodes = paths(branches);
    const row = Numbers.treeScores(scheme.size, state.content, nodes)[Math.min(state.node, nodes.length - 1)];
    const text = `${scheme.label}: score of each node with the chosen one; choose another by a click`;
    return html("figure", {}, html("figcaption", {}, text),
      Draw.tree(nodes, row, state.node, node => change(() => { state.node = node; }), { width: Math.min(width, 640), label: text }));
  }

  const table = (titles, rows) => html("div", { class: "scroll", tabindex: 0 }, html("table", { class: "numbers" }, html("thead", {}, html("tr", {}, ...titles.map(title => html("th", { scope: "col" }, title)))),
    html("tbody", {}, ...rows.map(([name, ...cells]) => html("tr", {}, html("th", { scope: "row" }, name), ...cells.map(cell => html("td", {}, cell)))))));

  const rotates = block => "frequency" in block && block.frequency[0][0] !== undefined && block.kind !== "waves";

  function extension(schemes, width) {
    const able = schemes.filter(scheme => scheme.variant.rules.length);
    if (!able.length) {
      part("lengths").replaceChildren(html("p", {}, "None of the chosen schemes has frequencies that a rule could change: permutations, rings, trees and biases stay as they are."));
      return;
    }
    const scheme = able[Number(state.extended)] ?? able[0], set = key => value => change(() => { state[key] = value; });
    const factor = Number(state.factor), trained = Number(state.trained), block = scheme.size.blocks.find(one => one.extends);
    const before = Numbers.frequencies(block, heads()[0], scheme.base, null), pairs = before[0].map((_, i) => i + 1);
    const speed = before[0].map((_, i) => Math.hypot(...before.map(row => row[i])));
    const rules = scheme.variant.rules.map((name, colour) => ({ name, colour: colour + 1, factor, trained }));
    const shares = rules.map(rule => ({ name: RULES[rule.name], colour: rule.colour, x: pairs, y: Numbers.share(rule, speed) }));
    const last = Math.log2(trained * factor), x = Array.from({ length: 121 }, (_, i) => i / 120 * last), column = columns(scheme)[0].column;
    const near = power => Array.from({ length: NEAR }, (_, i) => Math.round(Math.pow(2, power + (i / (NEAR - 1) - 0.5) * last / 120)));
    const line = (name, colour, rule) => {
      const value = score(scheme, rule);
      return { name, colour, x, y: x.map(power => near(power).reduce((sum, distance) => sum + value(at(column, -distance)), 0) / NEAR) };
    };
    const curves = [line("not extended", 0, null), ...rules.map(rule => line(RULES[rule.name], rule.colour, rule))];
    const turns = value => value ? (2 * Math.PI / value).toLocaleString("en", { maximumSignificantDigits: 4 }) : "-", slowest = values => values.some(value => value > 0) ? Math.min(...values.filter(value => value > 0)) : 0;
    const rows = rules.map((rule, n) => {
      const after = speed.map((value, i) => value * shares[n].y[i]), sharp = Numbers.attentionFactor(rule);
      return [RULES[rule.name], turns(Math.max(...after)), turns(slowest(after)), sharp.toFixed(4), (sharp * sharp).toFixed(4)];
    });
    part("lengths").replaceChildren(html("fieldset", {}, html("legend", {}, "Longer than in training"), html("div", { class: "controls" },
      select("explorer-extended", "scheme", Object.fromEntries(able.map((one, n) => [n, one.label])), state.extended, set("extended")),
      select("explorer-trained", "trained length", same([256, 1024, 2048, 4096, 8192, 32768]), state.trained, set("trained")),
      select("explorer-factor", "times as long", same([1, 2, 4, 8, 16, 32]), state.factor, set("factor")),
      select("explorer-rule", "rule in the code", { none: "none", ...Object.fromEntries(rules.map(rule => [rule.name, RULES[rule.name]])) }, state.rule, set("rule")))),
    Draw.curves(shares, { width, xLabel: "pair of features", yLabel: "share of its speed", label: `Share of the speed that each pair keeps at ${factor} times ${trained} positions` }),
    Draw.curves(curves, { width, power: true, xLabel: "distance, mean over nearby ones", yLabel: scheme.kind === "linear" ? "score" : "logit",
      label: `Kernel of ${scheme.label} up to ${factor} times ${trained} positions, by rule` }), legend(curves),
    table(["rule", "fastest turn", "slowest turn", "attention factor", "of logits"], [["not extended", turns(Math.max(...speed)), turns(slowest(speed)), "1.0000", "1.0000"], ...rows]));
  }

  function exactness(schemes, width) {
    const found = [];
    for (const scheme of schemes) {
      const block = scheme.size.blocks.find(rotates);
      if (!block) {
        const exact = scheme.size.blocks.some(one => one.kind === "permutation") ? "powers of permutations are indices, computed with integers" :
          isTree(scheme) ? "operators are products along a path; no position is a large number" : "only differences of positions count, which are integers or float64";
        found.push(html("p", {}, `${scheme.label}: ${exact}. Nothing depends on how far the position is.`));
      } else {
        const powers = Array.from({ length: 32 }, (_, i) => i);
        const errors = powers.map(power => Numbers.errors(block, heads()[0], scheme.base, [0, 1, 2, 3].map(n => 2 ** power + n)));
        const lines = Object.keys(Numbers.METHODS).map(name => ({ name, x: powers, y: errors.map(one => one[name]) }));
        found.push(Draw.curves(lines, { width, logarithmic: true, power: true, xLabel: "position", yLabel: "largest error", label: `Largest error of a cosine or sine of ${scheme.label} by position, for ${lines.length} ways` }),
          legend(lines), html("p", { class: "note" }, `${scheme.label}, four positions from each power of two on. The reference has 192 bits.`),
          table(["error at position", "2^10", "2^20", "2^31"], lines.map(line => [line.name, ...[10, 20, 31].map(power => line.y[power].toExponential(1))])));
      }
    }
    part("exactness").replaceChildren(...found);
  }

  function codes(schemes) {
    part("code").replaceChildren(...schemes.map((scheme, n) => {
      const text = code(scheme), block = html("pre", { tabindex: 0, "aria-label": `Code of ${scheme.label}` }, html("code", { id: `explorer-code-${n}` }, text));
      const copy = html("button", { type: "button", "aria-label": `Copy the code of ${scheme.label}`, click: async () => {
        getSelection().selectAllChildren(block);
        try {
          await navigator.clipboard.writeText(text);
          copy.textContent = "Copied";
        } catch {
          copy.textContent = "Selected: copy it with Ctrl+C";
        }
      } }, "Copy");
      return html("div", {}, block, copy);
    }));
  }

  function draw() {
    const schemes = state.schemes.map(resolve), width = Math.max(260, Math.min(760, part("kernels").clientWidth || 340));
    kernels(schemes, width);
    extension(schemes, width);
    exactness(schemes, width);
    codes(schemes);
  }

  // Change the choices, and draw with the focus where it was.
  function change(how) {
    const focus = document.activeElement?.id;
    how();
    choices();
    draw();
    if (focus) document.getElementById(focus)?.focus();
    try {
      history.replaceState(null, "", `#${encodeURIComponent(JSON.stringify(state))}`);
    } catch (error) {
      if (location.protocol !== "file:") throw error; // some browsers refuse it to files
    }
  }

  // Read the choices from the address, where they are; what is not one of them keeps its start.
  function restore() {
    let saved;
    try {
      saved = JSON.parse(decodeURIComponent(location.hash.slice(1)));
    } catch {
      return; // an anchor of the page
    }
    const schemes = Array.isArray(saved?.schemes) ? saved.schemes.filter(choice => choice?.name in CATALOGUE.schemes).slice(0, MOST) : [];
    if (schemes.length) state.schemes = schemes.map(choice => ({ ...START, ...choice }));
    const numeric = value => /^\d{1,6}$/.test(value);
    for (const key of Object.keys(state).filter(key => key !== "schemes"))
      if (typeof saved?.[key] === typeof state[key] && (!numeric(state[key]) || numeric(saved[key]) || saved[key] === "all")) state[key] = saved[key];
  }

  function missing() {
    const entries = Object.entries(CATALOGUE.missing);
    part("missing").replaceChildren(html("ul", {}, ...entries.map(([name, reason]) => html("li", {}, html("code", {}, name), `: ${reason}.`))));
  }

  restore();
  choices();
  missing();
  draw();
  let last = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth !== last) draw();
    last = innerWidth;
  });
  return { change, code, resolve, score, state };
})();
