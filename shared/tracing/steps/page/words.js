// What a line changed, in a sentence: for the live region, the table of a step, and readers who see no colours. Loaded
// after replay.js.
"use strict";

const listed = (/** @type {any[]} */ names) => (names.length > 1 ? `${names.slice(0, -1).join(", ")} and ${names.at(-1)}` : `${names[0] ?? "nothing"}`);
/** @param {string} text */
const quoted = (text) => `“${text}”`;
/** @param {number} start @param {number} count */
const range = (start, count) => (count === 1 ? `token ${start}` : `tokens ${start} to ${start + count - 1}`);
const isRun = (/** @type {any[]} */ numbers) => numbers.length > 2 && numbers.every((each, at) => Number(each) === Number(numbers[0]) + at);
const unitsOf = (/** @type {string} */ unit, /** @type {any[]} */ numbers) =>
  numbers.length === 1 ? `${unit} ${numbers[0]}` : `${unit}s ${isRun(numbers) ? `${numbers[0]} to ${numbers.at(-1)}` : listed(numbers)}`;

/** What happens to a request that enters a queue. @type {Record<string, string>} */
const ENTRIES = {
  waiting: "joins the waiting requests",
  running: "joins the running requests",
  ending: "has ended, while a step in flight still computes it",
  finished: "joins the finished requests",
};

/** A sentence for each part of the state, from the state before and after the line; none where nothing changed.
 * @type {Record<string, (before: any, after: any, recording: Recording) => string[]>} */
const SENTENCES = {
  queues(before = {}, after = {}) {
    const moved = Object.keys(after).flatMap((name) => {
      const fresh = after[name].filter((/** @type {string} */ id) => !before[name]?.includes(id));
      return fresh.map((/** @type {string} */ id) => `${id} ${ENTRIES[name] ?? `joins the ${name} requests`}`);
    });
    const gone = Object.keys(before).flatMap((name) => {
      const left = before[name].filter((/** @type {string} */ id) => !Object.values(after).flat().includes(id));
      return left.map((/** @type {string} */ id) => `${id} leaves the ${name} requests`);
    });
    return moved.length + gone.length ? [...moved, ...gone] : ["the order of a queue changes"];
  },
  requests(before = {}, after = {}, recording) {
    const changed = Object.keys({ ...before, ...after }).filter((id) => !isSame(before[id], after[id]));
    return changed.flatMap((id) => (after[id] ? requestSentences(id, before[id] ?? {}, after[id], recording) : [`${id} is no longer known`]));
  },
  schedule(_, after) {
    if (!after) return ["the schedule is done"];
    const entries = after.items.map((/** @type {Entry} */ { id, tokens, start, kind }) => `${kind} of ${id}, ${range(start, tokens)}`);
    return [entries.length ? `the schedule: ${entries.join(", then ")}` : "the schedule is empty"];
  },
  batch(_, after) {
    return [after ? `the batch has ${some(after.token_ids.length, "token")} of ${listed(after.ids)}` : "the batch is done"];
  },
  pool(before, after, recording) {
    /** @type {Map<string, string[]>} */
    const said = new Map();
    for (const block of Object.keys({ ...before?.blocks, ...after?.blocks })) {
      const [was, now] = [before?.blocks[block], after?.blocks[block]];
      if (isSame(was, now)) continue;
      const fate = now?.[0].length ? `held by ${listed(now[0])}` : now ? recording.unheld : "free";
      said.set(fate, [...(said.get(fate) ?? []), block]);
    }
    const { unit } = after ?? before;
    return [...said].map(([fate, blocks]) => `${unitsOf(unit, blocks)} ${blocks.length > 1 ? "are" : "is"} ${fate}`);
  },
  tree: (_, after = {}) => [`the prefix tree has ${some(Object.keys(after).length, "node")}`],
  in_flight: (_, after) => [after ? `in flight: ${unitsOf("step", [...new Set(after.map((/** @type {any} */ { step }) => step))])}` : "nothing is in flight"],
  drafts(before = {}, after = {}, recording) {
    const changed = Object.keys(after).filter((id) => !isSame(before[id], after[id]));
    return changed.map((id) => {
      const { granted, ids, accepted, rejected } = after[id];
      if (accepted !== undefined) return `${id} keeps ${accepted} of ${some(accepted + rejected, "draft")}`;
      if (!ids) return `${id} may have ${some(granted, "draft")}`;
      return ids.length ? `${some(ids.length, "draft")} for ${id}: ${quoted(recording.words(ids))}` : `no draft for ${id}`;
    });
  },
  sampled(before = {}, after = {}, recording) {
    const fresh = Object.keys(after).filter((id) => !isSame(before[id], after[id]));
    return fresh.map((id) => `${quoted(recording.words(after[id]))} is sampled for ${id}`);
  },
  grammar(before = {}, after = {}) {
    const changed = Object.keys(after).filter((id) => !isSame(before[id], after[id]));
    return changed.map((id) => `the grammar of ${id} is in state ${after[id].state} and allows ${some(after[id].allowed, "token")}`);
  },
  kept(before = {}, after = {}) {
    const fresh = Object.keys(after).filter((id) => !isSame(before[id], after[id]));
    return fresh.map((id) => {
      const heads = after[id].layers.flat();
      return `of ${some(after[id].tokens, "token")} of ${id}, each KV head keeps ${[...new Set([Math.min(...heads), Math.max(...heads)])].join(" to ")}`;
    });
  },
  variables(before = {}, after = {}) {
    return Object.keys(after).flatMap((depth) => {
      const fresh = Object.keys(after[depth]).filter((name) => before[depth] && before[depth][name] !== after[depth][name]);
      return fresh.map((name) => `the variable ${name} is ${after[depth][name]}`);
    });
  },
};

/** @param {string} id @param {Partial<Served>} before @param {Served} after @param {Recording} recording @returns {string[]} */
function requestSentences(id, before, after, recording) {
  const given = Object.values(after.outputs).slice(Object.keys(before.outputs ?? {}).length);
  const { unit } = recording.data.state.pool;
  const differs = (/** @type {keyof Served} */ key) => !isSame(before[key], after[key]);
  if (!before.status) return [`${id} arrives with ${some(after.known, "token")}`];
  return [
    differs("status") && `${id} is ${after.status}${after.reason ? ` (${after.reason})` : ""}`,
    differs("computed") && `${some(after.computed, "token")} of ${id} ${after.computed === 1 ? "is" : "are"} computed`,
    given.length && `${id} gets ${quoted(recording.words(given))}`,
    differs("written") && after.written !== undefined && `${some(after.written, "token")} of ${id} ${after.written === 1 ? "is" : "are"} written`,
    differs("blocks") && `${id} holds ${after.blocks?.length ? unitsOf(unit, after.blocks) : `no ${unit}`}`,
  ].filter((said) => typeof said === "string");
}

/** What an event changed; panels in `hidden` are not told. @param {Recording} recording @param {number} index @param {string[]} hidden */
function told(recording, index, hidden = []) {
  const [before, after] = /** @type {any[]} */ ([recording.before(index), recording.states[index]]);
  const parts = Object.keys(SENTENCES).filter((part) => before[part] !== after[part] && !isSame(before[part], after[part]));
  const said = parts.flatMap((part) => (hidden.includes(part) ? [] : SENTENCES[part](before[part], after[part], recording)));
  for (const [name, spans] of recording.lanes()) {
    const lane = name === "GPU" ? "the GPU" : name;
    for (const { step, span: [work, first, last] } of spans) {
      if (index === first) said.push(`${lane} begins the ${work} of step ${step}`);
      if (index === last) said.push(`${lane} finishes the ${work} of step ${step}`);
    }
  }
  if (recording.spot(index).kind === "raise" || index === recording.length - 1) said.unshift(recording.data.error ?? "");
  const text = said.filter(Boolean).join("; ");
  const begin = recording.data.requests.some(({ id }) => text.startsWith(`${id} `)) ? text.slice(0, 1) : text.slice(0, 1).toUpperCase();
  return text ? `${begin}${text.slice(1)}.` : "This line changes nothing that is shown.";
}
