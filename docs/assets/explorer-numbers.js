"use strict";
// The numbers of the page `explorer`: frequencies, rules for longer sequences, relative kernels, and errors over position.
// Blocks of features come from tools/explorer.py. Offsets are key minus query, as in docs/schemes.md.
const Numbers = (() => {
  const BITS = 192n, ONE = 1n << BITS; // of fixed-point numbers, for references beyond float64
  const PI = (3141592653589793238462643383279502884197169399375105820974944592307n << BITS) / 10n ** 66n;

  // Frequencies of one coordinate: a rule of tools/explorer.py as an array.
  function expand(row, base) {
    if ("same" in row) return new Array(row.count).fill(row.same);
    if ("turns" in row) return row.turns.map(turns => 2 * Math.PI / row.of * turns);
    return "list" in row ? row.list : powers(row).map(power => power < 0 ? 0 : Math.pow(base, -power / row.of));
  }

  const powers = ({ powers }) =>
    Array.isArray(powers) ? powers : Array.from({ length: powers.count }, (_, i) => powers.first + powers.step * i);

  // Frequencies [coordinate][pair] of a block in radians per step, extended by a rule or not (null).
  function frequencies(block, head, base, rule) {
    const rows = block.frequency[head % block.frequency.length].map(row => expand(row, base));
    const exact = block.single ? rows.map(row => row.map(Math.fround)) : rows;
    if (!rule || !block.extends) return exact;
    const kept = share(rule, exact[0].map((_, i) => Math.hypot(...exact.map(row => row[i]))));
    return exact.map(row => row.map((value, i) => value * kept[i]));
  }

  // Speeds as a geometric series: the log of its ratio, the index of each speed, and the number of different ones, as
  // isopos/lengths.py.
  function series(speed) {
    const moving = speed.filter(value => value > 0).sort((a, b) => b - a), fastest = moving[0], slowest = moving.at(-1);
    const count = moving.filter((value, i) => !i || value < moving[i - 1] * (1 - 1e-9)).length;
    const ratio = Math.log(fastest / slowest) / Math.max(count - 1, 1), step = ratio > 0 ? ratio : 1;
    const rank = speed.map(value => Math.max(Math.log(fastest / Math.max(value, slowest)) / step, 0));
    return { step, rank, count, fastest };
  }

  const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

  // The factor of each speed by a rule {name, factor, trained, rescale}, with the defaults of isopos/lengths.py.
  function share(rule, speed) {
    const { name, factor, trained } = rule;
    const turns = value => value * trained / (2 * Math.PI);
    const parts = kept => speed.map((value, i) => kept(value, i) + (1 - kept(value, i)) / factor);
    if (name === "linear") return speed.map(() => 1 / factor);
    if (name === "longrope") return speed.map((_, i) => 1 / rescale(factor, speed.length)[i]);
    if (name === "llama3") return parts(value => clamp((turns(value) - 1) / 3, 0, 1));
    if (name === "drop") return speed.map(() => 0);
    const { step, rank, count, fastest } = series(speed);
    if (name === "dype") return rank.map(index => Math.pow(factor, -2 * index / Math.max(count - 1, 1))); // at its time 1
    if (name === "dynamic") return rank.map(index => Math.pow(factor, -index / Math.max(count - 1, 1)));
    const bound = number => Math.log(turns(fastest) / number) / step;
    const low = Math.max(Math.floor(bound(32)), 0), high = Math.min(Math.ceil(bound(1)), 2 * count - 1);
    return parts((_, i) => rank[i] < high ? 1 - clamp((rank[i] - low) / Math.max(high - low, 1e-3), 0, 1) : 0);
  }

  // Example factors of LongRoPE, whose real ones a search finds: from 1 for the first pair to the factor for the last.
  const rescale = (factor, count) =>
    Array.from({ length: count }, (_, i) => Number(Math.pow(factor, i / Math.max(count - 1, 1)).toPrecision(6)));

  function attentionFactor({ name, factor, trained }) {
    if (name === "yarn") return 0.1 * Math.log(factor) + 1;
    return name === "longrope" ? Math.sqrt(1 + Math.log(factor) / Math.log(trained)) : 1;
  }

  // Unit vectors q and k of d features, in the encoding's own basis: null for the mean over all q = k.
  function content(kind, features) {
    if (kind === "mean") return null;
    const unit = vector => vector.map(value => value / Math.hypot(...vector));
    const q = unit(Array.from({ length: features }, (_, i) => Math.sin(1 + 2 * i + i * i / 3)));
    const other = unit(q.map((_, i) => Math.cos(2 + i + i * i / 5)));
    return { q, k: kind === "same" ? q : unit(q.map((value, i) => value + other[i])) };
  }

  // <rho(x) q, rho(y) k> as a function of the offset [coordinate], for one head: the mean over unit q = k, or fixed ones.
  function kernel(size, head, base, rule, kind) {
    const vectors = content(kind, size.features), parts = [];
    let first = 0;
    for (const block of size.blocks) {
      const slice = vectors && { q: vectors.q.slice(first, first + block.features), k: vectors.k.slice(first, first + block.features) };
      parts.push(part(block, head, base, rule, slice, size.features));
      if (block.kind !== "waves") first += block.features;
    }
    return offset => parts.reduce((sum, score) => sum + score(offset), 0);
  }

  const dot = (a, b) => a.reduce((sum, value, i) => sum + value * b[i], 0);

  // The score of one block, as a function of the offset; v are its slices of q and k.
  function part(block, head, base, rule, v, features) {
    if (block.kind === "identity" || block.kind === "tree") {
      const constant = v ? dot(v.q, v.k) : block.features / features;
      return () => constant;
    }
    if (block.kind === "permutation") return permutation(block, head, v, features);
    const rows = frequencies(block, head, base, rule), count = rows[0].length;
    const angle = (offset, i) => rows.reduce((sum, row, c) => sum + row[i] * (offset[block.columns[c]] ?? 0), 0);
    const total = term => offset => {
      let sum = 0;
      for (let i = 0; i < count; i++) sum += term(angle(offset, i), i, offset);
      return sum;
    };
    if (block.kind === "waves") {
      const [a, b] = block.amplitudes;
      return total((turned, i) => a[i] * Math.cos(turned) - b[i] * Math.sin(turned));
    }
    if (block.kind === "lift") return total((turned, i) => (v ? v.q[i] * v.k[i] : 1 / features) * Math.cos(turned));
    const rotated = (turned, i, j) => Math.cos(turned) * (v.q[i] * v.k[j] + v.q[i + 1] * v.k[j + 1])
      + Math.sin(turned) * (v.q[i + 1] * v.k[j] - v.q[i] * v.k[j + 1]);
    if (block.kind === "rotation") return total((turned, i) => v ? rotated(turned, 2 * i, 2 * i) : 2 / features * Math.cos(turned));
    return total((turned, i, offset) => {
      const steps = offset[block.columns[0]], scale = block.growth ? Math.exp(block.growth[i] * steps) : 1;
      if (!v) return scale * block.order * 2 / features * Math.cos(turned);
      let sum = 0;
      for (let to = 0; to < block.order; to++)
        for (let from = to, power = 1; from < block.order; from++, power *= steps / block.length / (from - to))
          sum += power * rotated(turned, 2 * (i + to * count), 2 * (i + from * count));
      return scale * sum;
    });
  }

  // Cycles of a permutation: for each feature its cycle and its rank there.
  function cycles(map) {
    const cycle = new Array(map.length), rank = new Array(map.length);
    map.forEach((_, start) => {
      if (cycle[start]) return;
      const members = [];
      for (let at = start; !cycle[at]; at = map[at]) {
        cycle[at] = members;
        rank[at] = members.length;
        members.push(at);
      }
    });
    return { cycle, rank };
  }

  function permutation(block, head, v, features) {
    const axes = block.maps[head % block.maps.length].map(cycles);
    const power = (start, offset) => axes.reduce((at, { cycle, rank }, c) => {
      const steps = offset[block.columns[c]] ?? 0, length = cycle[at].length;
      return cycle[at][((rank[at] + steps) % length + length) % length];
    }, start);
    return offset => {
      let sum = 0;
      for (let i = 0; i < block.features; i++) {
        const moved = power(i, offset);
        sum += v ? v.q[i] * v.k[moved] : (moved === i) / features;
      }
      return sum;
    };
  }

  // Number added to the logit at an offset of a line.
  function bias(bias, head, offset) {
    if (!bias) return 0;
    if (bias.kind === "kerple") {
      const [r1, r2, distance] = [bias.first[head], bias.second[head], Math.abs(offset)];
      return bias.power ? -r1 * Math.pow(distance, r2) : -r1 * Math.log1p(r2 * distance);
    }
    if (bias.kind === "fire") {
      const share = Math.log1p(bias.rate * Math.abs(offset)) / Math.log1p(bias.rate * bias.length), [u, w] = bias.into;
      return bias.out[head].reduce((sum, value, i) => sum + value * Math.max(share * u[i] + w[i], 0), 0);
    }
    const distance = bias.bidirectional ? Math.abs(offset) : Math.max(-offset, 0);
    const bucket = bias.starts.filter(start => start <= distance).length + (bias.bidirectional && offset > 0 ? bias.one_way : 0);
    return bias.numbers[head][bucket];
  }

  // Mean of <rho(x) q, rho(y) q> between all nodes of a tree, given as paths of branches, or for the fixed vectors.
  function treeScores(size, kind, paths) {
    const vectors = content(kind, size.features), d = size.features, at = size.blocks.findIndex(next => next.kind === "tree");
    const block = size.blocks[at], first = size.blocks.slice(0, at).reduce((sum, next) => sum + next.features, 0), width = block.features;
    const unit = i => Array.from({ length: width }, (_, j) => Number(i === j));
    const inputs = vectors ? [vectors.q.slice(first, first + width), vectors.k.slice(first, first + width)] : [...Array(width).keys()].map(unit);
    const rest = vectors ? dot(vectors.q, vectors.k) - dot(...inputs) : (d - width) / d;
    const apply = (path, vector) => [...path].reduceRight((moved, branch) => block.steps[branch].map(row => dot(row, moved)), vector);
    const mapped = paths.map(path => inputs.map(vector => apply(path, vector)));
    return mapped.map(a => mapped.map(b => rest + (vectors ? dot(a[0], b[1]) : a.reduce((sum, row, i) => sum + dot(row, b[i]), 0) / d)));
  }

  // A float64 number as a fixed-point number: exact down to 2^-192.
  function fixed(value) {
    const exponent = Math.floor(Math.log2(value)) - 60;
    const whole = BigInt(Math.round(value * Math.pow(2, -exponent))), shift = BITS + BigInt(exponent);
    return shift >= 0n ? whole << shift : whole >> -shift;
  }

  const raised = (value, power) => {
    let out = ONE;
    for (let square = value; power; power >>= 1, square = square * square >> BITS) if (power & 1) out = out * square >> BITS;
    return out;
  };

  // Frequencies as fixed-point numbers: of a rule from the base itself, otherwise of the float64 or float32 values.
  function references(block, head, base) {
    const row = block.frequency[head % block.frequency.length][0];
    if (block.single || !("powers" in row)) return frequencies(block, head, base, null)[0].map(value => value ? fixed(Math.abs(value)) : 0n);
    const target = fixed(base), n = row.of;
    let root = fixed(Math.pow(base, 1 / n));
    for (let i = 0; i < 3; i++) root -= (root - (target << BITS) / raised(root, n - 1)) / BigInt(n); // Newton's method
    const ratio = (ONE << BITS) / root;
    return powers(row).map(power => power < 0 ? 0n : raised(ratio, power));
  }

  // The angle position * frequency in (-pi, pi], computed with 192 bits and rounded once.
  function angle(position, frequency) {
    const turned = BigInt(position) * frequency % (2n * PI);
    return Number(turned > PI ? turned - 2n * PI : turned) / Number(ONE);
  }

  const word = new DataView(new ArrayBuffer(4));
  function bfloat16(value) {
    word.setFloat32(0, value);
    const bits = word.getUint32(0);
    word.setUint32(0, (bits + 0x7fff + (bits >>> 16 & 1) & 0xffff0000) >>> 0);
    return word.getFloat32(0);
  }

  const METHODS = {
    "isopos, float64 table": { angle: (x, w) => x * w, table: value => value },
    "isopos, float32 table": { angle: (x, w) => x * w, table: Math.fround },
    "exact angle, bfloat16 table": { angle: (x, w) => x * w, table: bfloat16 },
    "float32 product": { angle: (x, w) => Math.fround(Math.fround(x) * Math.fround(w)), table: Math.fround },
    "bfloat16 product": { angle: (x, w) => bfloat16(bfloat16(x) * bfloat16(w)), table: bfloat16 },
  };

  // Largest error of a cosine or a sine at the positions, over all pairs of a block's first coordinate, by method.
  function errors(block, head, base, positions) {
    const exact = references(block, head, base), w = frequencies(block, head, base, null)[0].map(Math.abs);
    const largest = Object.fromEntries(Object.keys(METHODS).map(name => [name, 0]));
    for (const position of positions)
      exact.forEach((frequency, i) => {
        const right = angle(position, frequency), cos = Math.cos(right), sin = Math.sin(right);
        for (const [name, method] of Object.entries(METHODS)) {
          const turned = method.angle(position, w[i]);
          const off = Math.max(Math.abs(method.table(Math.cos(turned)) - cos), Math.abs(method.table(Math.sin(turned)) - sin));
          if (off > largest[name]) largest[name] = off;
        }
      });
    return largest;
  }

  return { METHODS, attentionFactor, bias, content, errors, frequencies, kernel, rescale, share, treeScores };
})();
