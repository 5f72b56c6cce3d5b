// The blocks of a KV cache as squares: which requests hold each, and how much of it is written. No part of the page is
// touched here. A classic script, loaded before pool.js.

const PoolBlocks = (() => {
  "use strict";
  const MOST_SQUARES = 1024;

  return class PoolBlocks {
    static SHARED = "shared"; // holders of blocks: several requests,
    static CACHED = "cached"; // and none, for a cached prefix

    /** `memory` is the response of /debug/memory; if not `isWhole`, the squares are those of the blocks in use alone. */
    constructor(memory, isWhole) {
      this.memory = memory;
      this.isWhole = isWhole;
      this.users = this.usersOfBlocks();
      const number = isWhole ? this.shown : this.numHeld;
      this.each = Math.max(1, Math.ceil(number / MOST_SQUARES)); // blocks of a square
      this.squares = isWhole ? this.contents() : this.usedContents();
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

    get unit() {
      return this.memory.unit;
    }

    /** Blocks that are drawn: all, or those up to the last that a recorded run ever held. */
    get shown() {
      return this.memory.num_shown ?? this.memory.num_blocks;
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
      for (const block of this.cached) {
        this.count(squares[Math.floor(block / this.each)], PoolBlocks.CACHED, this.memory.block_tokens);
      }
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
      return users.size > 1 ? PoolBlocks.SHARED : users.keys().next().value;
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
  };
})();
