// Names and colours of requests, constant while a request exists; up to eight requests have distinct colours. A classic
// script, loaded before pool.js.
"use strict";

class PoolCast {
  static COLOURS = 8; // distinguishable with colour blindness (Okabe and Ito); more requests are told apart by name

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
      const order = Array.from({ length: PoolCast.COLOURS }, (_, next) => (this.number + next) % PoolCast.COLOURS);
      const colour = order.reduce((best, next) => (uses(next) < uses(best) ? next : best));
      this.number += 1;
      this.known.set(id, { name: this.nameOf(id, this.number), colour });
    }
    return this.known;
  }
}
