// What is said of a KV cache's blocks: figures, labels, notes, and a sentence for each square. No part of the page is
// touched here. A classic script, loaded after pool_blocks.js and before pool.js.
"use strict";

class PoolWords {
  static MOST_NAMED = 24;
  static STATES = /** @type {Record<string, string>} */ ({
    prefill: "prompt just computed", decode: "decoding", recompute: "being recomputed",
    preempted: "preempted, waits to be recomputed", lost: "leaked: no running request holds it",
  });

  /** @param {PoolBlocks} blocks @param {Cast} cast */
  constructor(blocks, cast) {
    this.blocks = blocks;
    this.memory = blocks.memory;
    this.unit = blocks.unit;
    this.cast = cast;
    this.numFree = this.memory.num_blocks - blocks.numHeld - blocks.cached.length;
  }

  name = (/** @type {Holding} */ { request_id: id }) => this.cast.get(id)?.name ?? id;

  /** Names and values. @returns {Record<string, string>} */
  figures() {
    const { num_blocks: total, block_tokens: size, holdings, num_preemptions: preemptions } = this.memory;
    const { numHeld: held, numShared: shared, cached: { length: cached } } = this.blocks;
    const again = holdings.reduce((sum, { blocks }) => sum + blocks.length, 0) - held; // in a second block table
    const written = holdings.reduce((sum, { num_written: tokens }) => sum + tokens, 0) - again * size;
    return {
      [`${this.unit}s held`]: `${grouped(held)} of ${grouped(total)}`,
      ...(shared || cached ? { shared: grouped(shared), cached: grouped(cached) } : {}),
      free: grouped(this.numFree),
      "used blocks that are written": held ? `${Math.round((100 * written) / (held * size))} %` : "–",
      preemptions: grouped(preemptions),
    };
  }

  /** The picture in a sentence. */
  label() {
    const { num_blocks: total, holdings } = this.memory;
    const { numHeld: held, cached: { length: cached } } = this.blocks;
    const who = some(holdings.filter(({ blocks }) => blocks.length).length, "request");
    const gone = holdings.filter(({ state }) => state === "preempted").length;
    const more = gone ? `, ${some(gone, "request")} preempted` : "";
    return `${some(held, this.unit)} of ${grouped(total)} held by ${who}, ${cached ? `${cached} cached, ` : ""}${this.numFree} free${more}`;
  }

  /** What a square stands for. */
  note() {
    const { isWhole, each, shown } = this.blocks;
    const { num_blocks: total, block_tokens: size } = this.memory;
    return [
      !isWhole && `Only ${this.unit}s in use are drawn, request by request.`,
      each > 1 && `A square stands for ${isWhole ? "" : "up to "}${each} ${this.unit}s${isWhole ? " and is divided among their holders" : ""}.`,
      `A ${this.unit} has room for ${this.unit === "region" ? "the longest possible request, " : ""}${some(size, "token")}.`,
      shown < total && `The run never held the other ${some(total - shown, this.unit)}, which are not drawn.`,
    ].filter(Boolean).join(" ");
  }

  /** That nothing is drawn. */
  empty() {
    return this.blocks.cached.length ? "No block is in use." : `All ${some(this.memory.num_blocks, this.unit)} are free.`;
  }

  amount(/** @type {Holding} */ { state, blocks, num_written: written, num_tokens: tokens, num_cached_tokens: cached }) {
    const found = cached ? `, ${grouped(cached)} of them from the cache` : "";
    const held = `${some(written, "token")} in ${some(blocks.length, this.unit)}${found}`;
    return PoolWords.STATES[state] + (state === "preempted" ? ` (${some(tokens, "token")})` : ` · ${held}`);
  }

  square(/** @type {Square} */ { begin, parts, size, users }) {
    const unit = this.unit[0].toUpperCase() + this.unit.slice(1);
    const [[holder, { tokens }] = [undefined, { tokens: 0 }]] = parts;
    if (size === 1) return `${unit} ${begin}${holder ? this.part(holder, users, tokens) : " is free."}`;
    if (holder && !this.blocks.isWhole) return `${size} ${this.unit}s${this.part(holder, users, tokens, size)}`;
    const who = [...parts].map(([holder, { blocks }]) =>
      typeof holder === "string" ? `${blocks} ${holder}` : `${this.name(holder)} holds ${blocks}`,
    );
    const free = [...parts.values()].reduce((left, { blocks }) => left - blocks, size);
    return `${unit}s ${begin} to ${begin + size - 1}: ${[...who, `${free} free`].join(", ")}.`;
  }

  /** @param {Holder} holder @param {Users} users @param {number} tokens @param {number} blocks */
  part(holder, users, tokens, blocks = 1) {
    if (holder === "cached") return " is cached: its prefix is kept until the block is needed.";
    const [[holding, index]] = users;
    const begin = blocks > 1 ? "," : ":";
    if (holder !== "shared") return `${begin} ${this.holder(holding, index, tokens, blocks)}`;
    const names = [...users.keys()].map(this.name);
    const told = names.length > PoolWords.MOST_NAMED ? [...names.slice(0, PoolWords.MOST_NAMED), "…"] : names;
    return `${begin} shared by ${some(names.length, "request")} (${told.join(", ")})${this.where(index, blocks, "each")}.`;
  }

  /** @param {number} index @param {number} blocks @param {string} whose */
  where(index, blocks, whose = "its") {
    const { block_tokens: size } = this.memory;
    return `, ${blocks > 1 ? "from " : ""}entry ${index} of ${whose} block table, tokens ${index * size} to ${(index + blocks) * size - 1}`;
  }

  /** @param {Holding} holding @param {number} index @param {number} tokens @param {number} blocks */
  holder(holding, index, tokens, blocks) {
    const [name, id] = [this.name(holding), holding.request_id];
    const where = this.unit === "region" ? "" : this.where(index, blocks);
    const written = `${tokens} of ${blocks * this.memory.block_tokens} written`;
    return `request ${name}${name === id ? "" : ` (${id})`}${where}; ${written}. The request: ${this.amount(holding)}.`;
  }
}
