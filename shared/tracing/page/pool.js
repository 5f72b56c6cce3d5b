// The KV cache as a picture: one square per block, with the colour and name of the request that holds it, filled as far
// as it is written; a block that several requests hold shows their number. A classic script, since two pages use it: the server's, and the one that `infer trace` writes.

const PoolPicture = (() => {
  "use strict";
  const SVG = "http://www.w3.org/2000/svg";
  const COLOURS = 8; // distinguishable with colour blindness (Okabe and Ito); more requests are told apart by name
  const MOST_SQUARES = 1024;
  const MOST_LISTED = 24;
  const [LEAST, LARGEST, NAMED] = [6, 84, 20]; // pixels of a square; from NAMED on it shows a name
  const USED = [26, 18, 12, LEAST]; // pixels of a square where only used blocks are drawn: the first that fits
  const [BAR, MOST_BARS] = [44, 16]; // of a region: its height, and how many stand in one column
  const STATES = {
    prefill: "prompt just computed",
    decode: "decoding",
    recompute: "being recomputed",
    preempted: "preempted, waits to be recomputed",
    lost: "leaked: no running request holds it",
  };
  const [SHARED, CACHED] = ["shared", "cached"]; // holders of blocks: several requests, and none, for a cached prefix
  let count = 0;

  const draw = (name, attributes, parent) => {
    const element = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    parent?.append(element);
    return element;
  };
  const make = (name, className, parent, text = "") => {
    const element = parent.appendChild(document.createElement(name));
    element.className = className;
    element.textContent = text;
    return element;
  };
  const some = (number, word) => `${number.toLocaleString("en")} ${word}${number === 1 ? "" : "s"}`;
  const box = (x, y, width, height) => `M${x.toFixed(1)} ${y.toFixed(1)}h${width.toFixed(1)}v${height.toFixed(1)}h${(-width).toFixed(1)}z`;

  /** Names and colours of requests, constant while a request exists; up to eight requests have distinct colours. */
  class Cast {
    constructor(nameOf = (id, number) => String(number)) {
      this.nameOf = nameOf;
      this.known = new Map();
      this.number = 0;
    }

    meet(ids) {
      const here = new Set(ids);
      for (const id of this.known.keys()) if (!here.has(id)) this.known.delete(id);
      for (const id of here) {
        if (this.known.has(id)) continue;
        const used = [...this.known.values()].map(({ colour }) => colour);
        const uses = (colour) => used.filter((other) => other === colour).length;
        const order = Array.from({ length: COLOURS }, (_, next) => (this.number + next) % COLOURS);
        const colour = order.reduce((best, next) => (uses(next) < uses(best) ? next : best));
        this.number += 1;
        this.known.set(id, { name: this.nameOf(id, this.number), colour });
      }
      return this.known;
    }
  }

  return class PoolPicture {
    static Cast = Cast;
    static STATES = STATES;

    /**
     * Drawn inside the element; `height` returns the maximum height of the grid in pixels. While `isWhole` is false, only
     * the blocks in use are drawn, those of a request together in the order of its block table.
     */
    constructor(parent, { height = () => 320, label = "KV cache" } = {}) {
      this.id = `pool-${(count += 1)}`;
      this.height = height;
      this.label = label;
      this.isWhole = true;
      parent.classList.add("pool");
      this.figures = make("dl", "pool-figures", parent);
      this.frame = make("div", "pool-frame", parent);
      this.frame.tabIndex = 0;
      this.frame.setAttribute("role", "application");
      this.note = make("p", "pool-note", parent);
      this.told = make("output", "pool-told", parent);
      this.told.id = `${this.id}-told`;
      this.told.setAttribute("aria-live", "polite");
      this.frame.setAttribute("aria-describedby", this.told.id);
      this.legend(make("ul", "pool-legend", parent));
      this.list = make("ul", "pool-list", parent);
      this.list.setAttribute("aria-label", "Who holds it");
      this.frame.addEventListener("pointermove", (event) => this.point(event));
      this.frame.addEventListener("pointerdown", (event) => this.point(event));
      this.frame.addEventListener("pointerleave", () => this.select(undefined));
      this.frame.addEventListener("keydown", (event) => this.move(event));
      this.width = 0;
      new ResizeObserver(() => this.memory && this.frame.clientWidth !== this.width && this.render()).observe(this.frame);
    }

    legend(list) {
      list.setAttribute("aria-label", "Legend");
      for (const [kind, text] of [["free", "free"], ["part", "held, in part written"], ["prefill", "prompt just computed"], ["recompute", "being recomputed"]]) {
        const item = make("li", "", list);
        make("i", `pool-key ${kind}`, item);
        item.append(text);
      }
      const prefixes = { [SHARED]: "shared by so many requests", [CACHED]: "cached: a prefix that no request holds" };
      this.prefixKeys = Object.entries(prefixes).map(([kind, text]) => {
        const item = make("li", "", list);
        make("i", `pool-key ${kind}`, item, kind === SHARED ? "×2" : "");
        item.append(text);
        item.hidden = true; // until there are any
        return item;
      });
    }

    /** `memory` is the response of /debug/memory; `cast` knows its requests. */
    show(memory, cast) {
      this.memory = memory;
      this.cast = new Map(cast);
      this.render();
    }

    get numHeld() {
      return this.users.size;
    }

    get cached() {
      return this.memory.cached ?? [];
    }

    get numShared() {
      return [...this.users.values()].filter((users) => users.size > 1).length;
    }

    /** The requests that hold each block in use, with its place in their block tables. */
    usersOfBlocks() {
      const users = new Map();
      for (const holding of this.memory.holdings) {
        for (const [place, block] of holding.blocks.entries()) {
          if (!users.has(block)) users.set(block, new Map());
          users.get(block).set(holding, place);
        }
      }
      return users;
    }

    get unit() {
      return this.memory.unit;
    }

    /** Blocks that are drawn: all, or those up to the last that a recorded run ever held. */
    get shown() {
      return this.memory.num_shown ?? this.memory.num_blocks;
    }

    render() {
      this.width = this.frame.clientWidth;
      this.users = this.usersOfBlocks();
      const number = this.isWhole ? this.shown : this.numHeld;
      this.each = Math.max(1, Math.ceil(number / MOST_SQUARES)); // blocks of a square
      this.squares = this.isWhole ? this.contents() : this.usedContents();
      this.arrange();
      this.drawGrid();
      this.writeFigures();
      this.writeList();
      this.select(this.at < this.squares.length ? this.at : undefined);
    }

    /** The parts of each square: a holder, with the blocks that it holds and their written tokens; and the requests. */
    contents() {
      const total = this.shown;
      const squares = Array.from({ length: Math.ceil(total / this.each) }, (_, square) => ({
        begin: square * this.each,
        size: Math.min(this.each, total - square * this.each),
        parts: new Map(),
        users: new Map(),
      }));
      for (const [block, users] of this.users) this.add(squares[Math.floor(block / this.each)], users);
      for (const block of this.cached) this.count(squares[Math.floor(block / this.each)], CACHED, this.memory.block_tokens);
      return squares;
    }

    /** The same, of the blocks in use alone; a shared block is drawn with the first of its requests. */
    usedContents() {
      const drawn = new Set();
      return this.memory.holdings.flatMap((holding) => {
        const squares = [];
        for (const block of holding.blocks.filter((block) => !drawn.has(block))) {
          drawn.add(block);
          const users = this.users.get(block);
          const isNext = squares.at(-1)?.parts.has(this.holder(users)) && squares.at(-1).size < this.each;
          if (!isNext) squares.push({ begin: block, size: 0, parts: new Map(), users: new Map() });
          squares.at(-1).size += 1;
          this.add(squares.at(-1), users);
        }
        return squares;
      });
    }

    holder(users) {
      return users.size > 1 ? SHARED : users.keys().next().value;
    }

    add(square, users) {
      const { block_tokens: size } = this.memory;
      const [[holding, place]] = users;
      this.count(square, this.holder(users), Math.min(size, Math.max(0, holding.num_written - place * size)));
      for (const [user, at] of users) if (!square.users.has(user)) square.users.set(user, at);
    }

    count({ parts }, holder, tokens) {
      const part = parts.get(holder) ?? { blocks: 0, tokens: 0 };
      part.blocks += 1;
      part.tokens += tokens;
      parts.set(holder, part);
    }

    arrange() {
      const number = this.squares.length;
      if (!this.isWhole) {
        const columns = (side) => Math.max(1, Math.floor(this.width / side));
        const side = USED.find((side) => Math.ceil(number / columns(side)) * side <= this.height()) ?? LEAST;
        this.columns = columns(side) > 8 ? columns(side) - (columns(side) % 8) : columns(side);
        this.cell = [side, side];
        return;
      }
      if (this.unit === "region" && this.each === 1) {
        this.columns = Math.ceil(number / MOST_BARS);
        this.cell = [this.width / this.columns, Math.min(BAR, Math.max(14, this.height() / Math.ceil(number / this.columns)))];
        return;
      }
      const side = (columns) => Math.min(LARGEST, this.width / columns, this.height() / Math.ceil(number / columns));
      const widths = Array.from({ length: Math.max(1, Math.floor(this.width / LEAST)) }, (_, width) => width + 1);
      const round = widths.filter((columns) => columns <= Math.max(8, number) && (columns <= 8 || columns % 8 === 0)); // rows begin at round numbers
      this.columns = round.reduce((best, columns) => (side(columns) >= side(best) ? columns : best));
      this.cell = Array(2).fill(Math.max(LEAST, side(this.columns)));
    }

    corner(square) {
      return [(square % this.columns) * this.cell[0], Math.floor(square / this.columns) * this.cell[1]];
    }

    drawGrid() {
      const [width, height] = this.cell;
      const gap = width > 12 ? 3 : 1;
      const [wide, high] = [width - gap, height - gap];
      const rows = Math.ceil(this.squares.length / this.columns);
      const svg = draw("svg", { "aria-hidden": true });
      svg.style.width = `${this.columns * width}px`;
      svg.style.height = `${rows * height}px`;
      this.patterns(svg);
      const paths = new Map([...this.memory.holdings, SHARED, CACHED].map((holder) => [holder, { held: "", written: "" }]));
      const labels = [];
      let grid = "";
      this.squares.forEach(({ size, parts, users }, square) => {
        const [x, y] = this.corner(square);
        grid += box(x, y, wide, high);
        let left = x;
        for (const [holder, { blocks, tokens }] of parts) {
          const share = (wide * blocks) / size;
          paths.get(holder).held += box(left, y, share, high);
          paths.get(holder).written += box(left, y, (wide * tokens) / (size * this.memory.block_tokens), high);
          left += share;
          if (this.each === 1 && height >= NAMED && holder !== CACHED) labels.push([users, x + wide / 2, y + high / 2]);
        }
      });
      draw("path", { class: "pool-free", d: grid }, svg);
      for (const [holder, { held, written }] of paths) {
        if (!held) continue;
        const { request_id: id, state } = holder;
        const about = id === undefined ? {} : { "data-holder": id, "data-state": state };
        const group = draw("g", { class: `pool-holder ${this.look(holder)}`, ...about }, svg);
        draw("path", { class: "pool-held", d: held }, group);
        draw("path", { class: "pool-written", d: written }, group);
        const pattern = { recompute: "hatch", prefill: "dots" }[state];
        if (pattern) draw("path", { class: "pool-over", fill: `url(#${this.id}-${pattern})`, d: held }, group);
        draw("path", { class: "pool-edge", d: held }, group);
      }
      this.labels = labels.map(([users, x, y]) => {
        const holder = this.holder(users);
        const name = holder === SHARED ? `×${users.size}` : this.cast.get(holder.request_id).name;
        const size = Math.min(22, Math.max(11, height * 0.42));
        const label = draw("text", { class: `pool-name ${this.look(holder)}`, x, y }, svg);
        label.style.fontSize = `${size}px`;
        label.textContent = name.length * size * 0.6 < wide ? name : "";
        return { label, users, name: label.textContent };
      });
      this.cursor = draw("path", { class: "pool-cursor", d: "" }, svg);
      this.frame.replaceChildren(svg);
      const isEmpty = this.cached.length ? "No block is in use." : `All ${some(this.memory.num_blocks, this.unit)} are free.`;
      if (!this.squares.length) make("p", "pool-empty", this.frame, isEmpty);
    }

    look(holder) {
      return holder === SHARED || holder === CACHED ? holder : `colour-${this.cast.get(holder.request_id).colour}`;
    }

    patterns(svg) {
      const defs = draw("defs", {}, svg);
      const hatch = draw("pattern", { id: `${this.id}-hatch`, width: 8, height: 8, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" }, defs);
      draw("rect", { class: "pool-line", width: 3, height: 8 }, hatch);
      const dots = draw("pattern", { id: `${this.id}-dots`, width: 7, height: 7, patternUnits: "userSpaceOnUse" }, defs);
      draw("circle", { class: "pool-line", cx: 2, cy: 2, r: 1.3 }, dots);
    }

    writeFigures() {
      const { num_blocks: total, block_tokens: size, holdings, num_preemptions: preemptions } = this.memory;
      const [held, shared, cached] = [this.numHeld, this.numShared, this.cached.length];
      const free = total - held - cached;
      const again = holdings.reduce((sum, { blocks }) => sum + blocks.length, 0) - held; // in a second block table
      const written = holdings.reduce((sum, { num_written: tokens }) => sum + tokens, 0) - again * size;
      const prefixes = shared || cached ? { shared: shared.toLocaleString("en"), cached: cached.toLocaleString("en") } : {};
      [shared, cached].forEach((number, place) => number && (this.prefixKeys[place].hidden = false));
      const rows = {
        [`${this.unit}s held`]: `${held.toLocaleString("en")} of ${total.toLocaleString("en")}`,
        ...prefixes,
        free: free.toLocaleString("en"),
        "used blocks that are written": held ? `${Math.round((100 * written) / (held * size))} %` : "–",
        preemptions: preemptions.toLocaleString("en"),
      };
      this.figures.replaceChildren();
      for (const [name, value] of Object.entries(rows)) {
        const row = make("div", "", this.figures);
        make("dt", "", row, name);
        make("dd", "", row, value);
      }
      const who = holdings.filter(({ blocks }) => blocks.length);
      const what = `${some(held, this.unit)} of ${total.toLocaleString("en")} held by ${some(who.length, "request")}, ${cached ? `${cached} cached, ` : ""}${free} free`;
      const gone = holdings.filter(({ state }) => state === "preempted").length;
      const more = gone ? `, ${some(gone, "request")} preempted` : "";
      this.frame.setAttribute("aria-label", `${this.label}: ${what}${more}; arrow keys go through the squares, the list below has the same`);
      this.note.textContent = [
        !this.isWhole && `Only ${this.unit}s in use are drawn, request by request.`,
        this.each > 1 && `A square stands for ${this.isWhole ? "" : "up to "}${this.each} ${this.unit}s${this.isWhole ? " and is divided among their holders" : ""}.`,
        this.unit === "region"
          ? `A region has room for the longest request there may be, ${some(size, "token")}.`
          : `A block has room for ${some(size, "token")}.`,
        this.shown < total && `The run never held the other ${some(total - this.shown, this.unit)}, which are not drawn.`,
      ].filter(Boolean).join(" ");
    }

    writeList() {
      const { holdings, num_waiting: waiting } = this.memory;
      this.list.replaceChildren();
      for (const holding of holdings.slice(0, MOST_LISTED)) {
        const { name, colour } = this.cast.get(holding.request_id);
        const item = make("li", "", this.list);
        item.dataset.holder = holding.request_id;
        item.dataset.state = holding.state;
        make("i", `pool-swatch colour-${colour} ${holding.state}`, item, name);
        make("span", "", item, this.amount(holding));
        item.title = holding.request_id;
      }
      const rest = holdings.length - MOST_LISTED;
      if (rest > 0) make("li", "", this.list, `and ${rest} more`);
      const fresh = waiting - holdings.filter(({ state }) => state === "preempted").length;
      if (fresh > 0) make("li", "", this.list, `${fresh.toLocaleString("en")} more in the queue`);
      if (!this.list.childElementCount) make("li", "", this.list, "no block is in use");
    }

    amount({ state, blocks, num_written: written, num_tokens: tokens, num_cached_tokens: cached }) {
      if (state === "preempted") return `${STATES[state]} (${some(tokens, "token")})`;
      const found = cached ? `, ${cached.toLocaleString("en")} of them from the cache` : "";
      return `${STATES[state]} · ${some(written, "token")} in ${some(blocks.length, this.unit)}${found}`;
    }

    point(event) {
      const [x, y] = [event.clientX, event.clientY].map((at, side) => at - this.frame.getBoundingClientRect()[side ? "y" : "x"]);
      const column = Math.floor(x / this.cell[0]);
      const square = Math.floor(y / this.cell[1]) * this.columns + column;
      this.select(column < this.columns && this.squares[square] ? square : undefined);
    }

    move(event) {
      const way = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns }[event.key];
      if (!way || !this.memory) return;
      event.preventDefault();
      const next = this.at === undefined ? 0 : this.at + way;
      if (this.squares[next]) this.select(next);
    }

    /** The selected square; all squares of its request, or requests, are framed and show their index in its block table. */
    select(square) {
      this.at = square;
      const { users = new Map(), size } = this.squares[square] ?? {};
      const chosen = [...users.keys()].slice(0, size === 1 ? users.size : 1);
      const placeIn = (users) => users.get(chosen.find((user) => users.has(user)));
      const [width, height] = this.cell.map((side) => side - (this.cell[0] > 12 ? 3 : 1));
      const framed = this.squares.flatMap(({ users }, at) => (at === square || placeIn(users) !== undefined ? [at] : []));
      const frames = square === undefined ? [] : framed.map((at) => box(...this.corner(at), width, height));
      this.cursor.setAttribute("d", frames.join(""));
      for (const { label, users, name } of this.labels) label.textContent = placeIn(users) === undefined ? name : `[${placeIn(users)}]`;
      this.told.textContent = square === undefined ? "Point at a square, or move with the arrow keys." : this.tell(square);
    }

    tell(square) {
      const { begin, parts, size, users } = this.squares[square];
      const unit = this.unit[0].toUpperCase() + this.unit.slice(1);
      if (size === 1) {
        for (const [holder, { tokens }] of parts) return `${unit} ${begin}${this.tellPart(holder, users, tokens)}`;
        return `${unit} ${begin} is free.`;
      }
      if (!this.isWhole) {
        const [[holder, { tokens }]] = parts;
        return `${size} ${this.unit}s${this.tellPart(holder, users, tokens, size)}`;
      }
      const held = [...parts.values()].reduce((sum, { blocks }) => sum + blocks, 0);
      const isNamed = (holder) => holder !== SHARED && holder !== CACHED;
      const who = [...parts].map(([holder, { blocks }]) =>
        isNamed(holder) ? `${this.cast.get(holder.request_id).name} holds ${blocks}` : `${blocks} ${holder}`,
      );
      return `${unit}s ${begin} to ${begin + size - 1}: ${[...who, `${size - held} free`].join(", ")}.`;
    }

    tellPart(holder, users, tokens, blocks = 1) {
      if (holder === CACHED) return " is cached: its prefix is kept until the block is needed.";
      const [[holding, place]] = users;
      if (holder !== SHARED) return `${blocks > 1 ? "," : ":"} ${this.tellHolder(holding, place, tokens, blocks)}`;
      const names = [...users.keys()].map(({ request_id: id }) => this.cast.get(id).name);
      const told = names.length > MOST_LISTED ? [...names.slice(0, MOST_LISTED), "…"] : names;
      return `${blocks > 1 ? "," : ":"} shared by ${some(names.length, "request")} (${told.join(", ")})${this.tellPlace(place, blocks, "each")}.`;
    }

    tellPlace(place, blocks, whose = "its") {
      const { block_tokens: size } = this.memory;
      return `, ${blocks > 1 ? "from " : ""}place ${place} of ${whose} block table, tokens ${place * size} to ${(place + blocks) * size - 1}`;
    }

    tellHolder(holding, place, tokens, blocks = 1) {
      const { block_tokens: size } = this.memory;
      const { name } = this.cast.get(holding.request_id);
      const id = name === holding.request_id ? "" : ` (${holding.request_id})`;
      const where = this.unit === "region" ? "" : this.tellPlace(place, blocks);
      return `request ${name}${id}${where}; ${tokens} of ${blocks * size} written. The request: ${this.amount(holding)}.`;
    }
  };
})();
