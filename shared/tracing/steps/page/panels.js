// The state as panels. Each draws its part from the state alone, says how many rows it ever needs, so that nothing moves
// while the run plays, and marks what the line changed. Loaded after source.js.
"use strict";

/** What a panel draws from. */
class View {
  /** @param {Recording} recording @param {number} index @param {string | null} followed */
  constructor(recording, index, followed) {
    this.recording = recording;
    this.state = recording.states[index];
    this.old = recording.before(index);
    this.followed = followed;
    this.depth = recording.spot(index).depth; // of the function whose line it is; the state may have deeper ones
  }

  /** Whether the line changed what stands at a path. @param {Path} path */
  differs(...path) {
    return !isSame(at(this.old, path), at(this.state, path));
  }

  /** An element that belongs to requests, in the colour of the first. @param {HTMLElement} element @param {string[]} ids */
  own(element, ids) {
    element.dataset.request = ids.join(" ");
    if (ids.length) element.classList.add(`colour-${this.recording.colour(ids[0])}`);
    if (this.followed !== null && ids.includes(this.followed)) element.classList.add("followed");
    return element;
  }

  /** @param {string} id @param {HTMLElement} parent */
  chip(id, parent) {
    return this.own(make("span", id, parent, "chip"), [id]);
  }

  /** A row that begins with a request's name. @param {string} id @param {HTMLElement} parent */
  row(id, parent) {
    const row = this.own(make("div", "", parent, "row"), [id]);
    this.chip(id, row);
    return row;
  }

  /** A text, marked where the line changed it. @param {string} text @param {HTMLElement} parent @param {boolean} isChanged @param {string} look */
  text(text, parent, isChanged = false, look = "") {
    const element = make("span", text, parent, look);
    if (isChanged) element.classList.add("changed");
    return element;
  }
}

/** @typedef {{title: string, isWide?: boolean | ((recording: Recording) => boolean), rows: (recording: Recording) => number,
 *   of?: (state: State) => string, draw: (view: View, body: HTMLElement) => void}} Panel `of`: added to the title */

/** @type {Record<string, Panel>} */
const PANELS = {
  requests: {
    title: "Requests, tokens computed of those known",
    isWide: true,
    rows: ({ data }) => data.requests.length,
    draw(view, body) {
      const longest = Math.max(...view.recording.data.requests.map(({ id }) => view.recording.states.at(-1)?.requests[id]?.known ?? 0), 1);
      for (const { id } of view.recording.data.requests) {
        const row = view.row(id, body);
        const served = view.state.requests[id];
        view.text(served?.status ?? "to come", row, view.differs("requests", id, "status"), "status");
        const bar = make("span", "", row, "bar");
        if (served) tokenBar(view, id, served, bar, longest);
        view.text(served ? `${served.computed} of ${served.known}` : "", row, view.differs("requests", id, "computed"), "figure");
      }
    },
  },
  queues: {
    title: "Queues",
    rows: (recording) => queueNames(recording).length,
    draw(view, body) {
      for (const name of queueNames(view.recording)) {
        const ids = view.state.queues[name] ?? [];
        const row = make("div", "", body, "row");
        make("span", name, row, "name");
        for (const id of ids) {
          const isNew = !view.old.queues[name]?.includes(id);
          view.chip(id, row).classList.toggle("changed", isNew);
        }
        if (view.old.queues[name]?.some((id) => !ids.includes(id))) view.text("left", row, true, "soft");
      }
    },
  },
  schedule: {
    title: "Schedule",
    rows: (recording) => recording.most(({ schedule }) => schedule?.items.length ?? 0),
    isWide: (recording) => recording.data.settings.adapter !== undefined, // masks need room
    of: ({ schedule }) => (schedule ? ` of step ${schedule.step}` : ""),
    draw(view, body) {
      const { schedule } = view.state;
      if (!schedule) return void view.text("none", body, view.differs("schedule"), "soft");
      schedule.items.forEach(({ id, tokens, start, kind, rows, drafts = 0, masks = 0 }, place) => {
        const [row, isChanged] = [view.row(id, body), view.differs("schedule", "items", place)];
        const { known = 0, computed = 0 } = view.state.requests[id] ?? {}; // known: with what the commit has appended
        const whole = kind === "prefill" ? ` of ${Math.max(known - (computed < start + tokens ? 0 : rows), start + tokens)}` : "";
        view.text(kind, row, isChanged, `kind ${kind}`);
        const more = `${drafts ? `, ${some(drafts, "draft")}` : ""}${masks ? `, ${some(masks, "mask")} after each` : ""}`;
        view.text(`${range(start, tokens)}${whole}${more}`, row, isChanged, "range");
        view.text(view.recording.words(view.recording.tokens(view.state, id).slice(start, start + tokens)), row, false, "words");
      });
    },
  },
  pool: {
    title: "KV cache",
    of: ({ pool }) => `: ${some(pool.num_blocks, pool.unit)} of ${some(pool.block_size, "token")}`,
    rows: () => 0,
    draw(view, body) {
      const { pool } = view.state;
      const grid = make("div", "", body, `squares ${pool.unit}`);
      for (let block = 0; block < pool.num_blocks; block++) {
        const [owners, count] = pool.blocks[block] ?? [[], 0];
        const square = make("span", String(block), grid, "square");
        if (owners.length) view.own(square, owners);
        else square.classList.add(count ? "kept" : "free");
        const filled = [view.old, view.state].map((state) => owners.length && writtenShare(state, owners[0], block));
        square.classList.toggle("changed", view.differs("pool", "blocks", String(block)) || filled[0] !== filled[1]);
        square.style.setProperty("--written", `${100 * filled[1]}%`);
        if (owners.length > 1) make("sub", `×${owners.length}`, square);
        square.title = `${pool.unit} ${block}: ${owners.length ? listed(owners) : count ? view.recording.unheld : "free"}`;
      }
    },
  },
  sampled: {
    title: "Sampled",
    rows: (recording) => recording.most(({ sampled }) => Object.keys(sampled ?? {}).length),
    draw: (view, body) => each(view, "sampled", body, (row, id, tokens) => {
      tokens.forEach((token, place) => view.text(quoted(view.recording.words([token])), row, view.differs("sampled", id, place)));
    }),
  },
  in_flight: {
    title: "In flight",
    rows: (recording) => recording.most(({ in_flight: flying }) => flying?.length ?? 0),
    draw(view, body) {
      const flying = view.state.in_flight ?? [];
      if (!flying.length) view.text("nothing", body, view.differs("in_flight"), "soft");
      flying.forEach(({ step, ids }, place) => {
        const row = make("div", "", body, "row");
        view.text(`step ${step}`, row, view.differs("in_flight", place));
        for (const id of ids) view.chip(id, row);
      });
    },
  },
  drafts: {
    title: "Drafts",
    rows: (recording) => recording.most(({ drafts }) => Object.keys(drafts ?? {}).length),
    draw: (view, body) => each(view, "drafts", body, (row, id, { granted, ids, forced = 0, accepted }) => {
      if (!ids?.length) view.text(ids ? "none" : `may have ${granted}`, row, view.differs("drafts", id));
      ids?.forEach((token, place) => {
        const fate = accepted === undefined ? "pending" : place < accepted ? "accepted" : "rejected";
        const sign = place >= ids.length - forced ? "forced " : { pending: "", accepted: "✓ ", rejected: "✗ " }[fate];
        view.text(`${sign}${view.recording.words([token])}`, row, view.differs("drafts", id), `draft ${fate}`);
      });
    }),
  },
  tree: {
    title: "Prefix tree",
    rows: (recording) => recording.most(({ tree }) => Object.keys(tree ?? {}).length),
    draw(view, body) {
      const nodes = inOrder(view.state.tree ?? {});
      if (!nodes.length) view.text("empty", body, view.differs("tree"), "soft");
      for (const [name, depth, { tokens, blocks, users }] of nodes) {
        const row = make("div", "", body, "row");
        make("span", `${"   ".repeat(depth)}└`, row, "branch").setAttribute("aria-hidden", "true");
        view.text(blocks.join(" "), row, view.differs("tree", name), "blocks");
        view.text(users ? some(users, "user") : "unused", row, view.differs("tree", name, "users"), "soft");
        view.text(view.recording.words(tokens), row, false, "words");
      }
    },
  },
  grammar: {
    title: "Grammar",
    isWide: true,
    rows: (recording) => recording.most(({ grammar }) => Object.keys(grammar ?? {}).length),
    draw: (view, body) => each(view, "grammar", body, (row, id, { state, open, allowed, examples }) => {
      view.text(`state ${state}`, row, view.differs("grammar", id, "state"));
      view.text(open ? `open ${open}` : "nothing open", row, view.differs("grammar", id, "open"));
      view.text(`${some(allowed, "token")} allowed`, row, view.differs("grammar", id, "allowed"));
      view.text(examples.map((token) => quoted(view.recording.words([token]))).join(" "), row, false, "words");
    }),
  },
  batch: {
    title: "Batch, a column for each token",
    isWide: true,
    rows: (recording) => 6 + recording.most(({ batch }) => (batch?.ids.length ?? 0) + Object.keys(batch?.plan ?? {}).length),
    draw(view, body) {
      const { batch } = view.state;
      if (!batch) return void view.text("none", body, view.differs("batch"), "soft");
      tokenTable(view, batch, body);
      sequenceTable(view, batch, body);
    },
  },
  kept: {
    title: "Kept by compression, keys of each head, a row for each layer",
    isWide: true,
    rows: (recording) => recording.most(({ kept }) => Object.values(kept ?? {}).reduce((sum, { layers }) => sum + 1 + layers.length, 0)),
    draw(view, body) {
      for (const [id, { tokens, layers }] of Object.entries(view.state.kept ?? {})) {
        view.text(`of ${some(tokens, "token")}`, view.row(id, body), view.differs("kept", id, "tokens"));
        layers.forEach((heads, layer) => {
          const row = make("div", "", body, "row");
          make("span", `layer ${layer}`, row, "name");
          view.text(heads.join(" "), row, view.differs("kept", id, "layers"));
        });
      }
      if (!body.childElementCount) view.text("none", body, view.differs("kept"), "soft");
    },
  },
  variables: {
    title: "Variables of the function",
    isWide: true,
    rows: (recording) => recording.most(({ variables = {} }) => Math.max(0, ...Object.values(variables).map((each) => Object.keys(each).length))),
    draw(view, body) {
      const depth = String(view.depth);
      const now = view.state.variables?.[depth]; // none once the function has returned: what it had is shown
      for (const [name, value] of Object.entries(now ?? view.old.variables?.[depth] ?? {})) {
        const row = make("div", "", body, "row");
        make("span", name, row, "name");
        view.text(value, row, now !== undefined && view.differs("variables", depth, name), "words");
      }
      if (!body.childElementCount) view.text("none", body, false, "soft");
    },
  },
};

/** The queues that the run ever uses, in order. @param {Recording} recording */
function queueNames({ data, states }) {
  const used = new Set(["waiting", "running", "finished"]);
  for (const { queues } of states) for (const name of Object.keys(queues)) if (queues[name].length) used.add(name);
  return Object.keys({ ...data.state.queues, ...states.at(-1)?.queues }).filter((name) => used.has(name));
}

/** How much of a block its owner has written, from 0 to 1. @param {State} state @param {string} id @param {number} block */
function writtenShare({ requests, pool }, id, block) {
  const { blocks = [], written = 0 } = requests[id] ?? {};
  return Math.min(Math.max(written / pool.block_size - blocks.indexOf(block), 0), 1);
}

/** A row for each request that a part of the state has. @template {"drafts" | "grammar" | "sampled"} Part
 * @param {View} view @param {Part} part @param {HTMLElement} body
 * @param {(row: HTMLElement, id: string, value: NonNullable<State[Part]>[string]) => void} fill */
function each(view, part, body, fill) {
  const values = /** @type {any} */ (view.state[part] ?? {});
  for (const id of Object.keys(values)) fill(view.row(id, body), id, values[id]);
  if (!body.childElementCount) view.text("none", body, view.differs(part), "soft");
}

/** The tokens of a request as one bar: found in the cache, computed, in this step, known. All bars have one scale.
 * @param {View} view @param {string} id @param {Served} served @param {HTMLElement} bar @param {number} longest */
function tokenBar(view, id, served, bar, longest) {
  const entry = view.state.schedule?.items.find((item) => item.id === id);
  const cached = Math.min(served.cached ?? 0, served.computed);
  const now = entry ? Math.max(0, entry.start + entry.tokens - served.computed) : 0;
  const ahead = Math.max(0, served.known - served.computed - now);
  for (const [look, count] of Object.entries({ cached, computed: served.computed - cached, now, ahead })) {
    if (!count) continue;
    const part = view.own(make("i", "", bar, look), [id]);
    part.style.width = `${(100 * count) / longest}%`;
    part.style.setProperty("--tokens", String(count));
    const isChanged = look === "now" ? view.differs("schedule") : look === "computed" && view.differs("requests", id, "computed");
    part.classList.toggle("changed", isChanged);
  }
  bar.setAttribute("role", "img");
  bar.setAttribute("aria-label", `${served.computed} computed, ${now} in this step, ${ahead} to come`);
}

/** A column for each token, in the order of the batch. @param {View} view @param {any} batch @param {HTMLElement} body */
function tokenTable(view, batch, body) {
  /** @type {string[]} */
  const owners = batch.ids.flatMap((/** @type {string} */ id, /** @type {number} */ place) => new Array(batch.num_new[place]).fill(id));
  const pending = new Set(batch.pending);
  const known = (/** @type {(id: number) => any} */ show) => batch.token_ids.map((/** @type {number} */ id, /** @type {number} */ token) => (pending.has(token) || id < 0 ? "?" : show(id)));
  const ids = known((id) => (id < 2 ** 32 ? id : `2³²+${id % 2 ** 32}`)); // a mask's is above every vocabulary
  const rows = { text: known((id) => view.recording.words([id])), token_ids: ids, positions: batch.positions, slots: batch.slots };
  const table = make("table", "", make("div", "", body, "wide"), "tokens");
  for (const [key, values] of Object.entries(rows)) {
    if (!values) continue;
    const row = make("tr", "", table);
    make("th", key === "token_ids" ? "id" : key, row).setAttribute("scope", "row");
    owners.forEach((id, token) => {
      const cell = view.own(make("td", String(values[token]), row, key), [id]);
      cell.classList.toggle("sampling", Boolean(batch.logit_rows?.includes(token)));
      cell.classList.toggle("changed", key !== "text" && view.differs("batch", key, token));
    });
  }
}

/** A row for each request of the batch, and its plan. @param {View} view @param {any} batch @param {HTMLElement} body */
function sequenceTable(view, batch, body) {
  const columns = Object.entries({ num_new: "new", num_cached: "cached", lengths: "length", tables: "block table" }).filter(([key]) => batch[key]);
  const table = make("table", "", make("div", "", body, "wide"), "sequences");
  const head = make("tr", "", make("thead", "", table));
  for (const name of ["request", ...columns.map(([, name]) => name)]) make("th", name, head).setAttribute("scope", "col");
  const rows = make("tbody", "", table);
  batch.ids.forEach((/** @type {string} */ id, /** @type {number} */ place) => {
    const row = view.own(make("tr", "", rows), [id]);
    view.chip(id, make("td", "", row));
    for (const [key] of columns) {
      make("td", [batch[key][place] ?? []].flat().join(" "), row).classList.toggle("changed", view.differs("batch", key, place));
    }
  });
  for (const [kind, { split, items }] of Object.entries(batch.plan ?? {})) {
    const said = items.map((/** @type {number[]} */ [sequence, tile, part]) => `${batch.ids[sequence]}:${tile}:${part}`).join(" ");
    const row = make("div", "", body, "row");
    make("span", `plan, ${kind}`, row, "name");
    view.text(`splits of ${split} keys; request:tile:split ${said}`, row, view.differs("batch", "plan", kind), "words");
  }
}

/** The nodes of a prefix tree, each after its parent, with name and depth. @param {Record<string, TreeNode>} tree
 * @returns {[string, number, TreeNode][]} */
function inOrder(tree, parent = 0, depth = 0) {
  const children = Object.entries(tree).filter(([, node]) => node.parent === parent);
  return children.flatMap(([name, node]) => [/** @type {[string, number, TreeNode]} */ ([name, depth, node]), ...inOrder(tree, Number(name), depth + 1)]);
}

/** The panels that a recording needs, in order. @param {Recording} recording @returns {[string, Panel][]} */
function panelsOf(recording) {
  const keys = new Set([recording.data.state, ...recording.states].flatMap((state) => Object.keys(state)));
  return Object.entries(PANELS).filter(([name]) => keys.has(name));
}
