// Requests to this server: the API key, the served model, and a sentence for each way in which a request can fail.

const byId = (id) => document.getElementById(id);
const givenKey = () => byId("key").value.trim().replace(/[^!-~]/g, "?"); // a header carries ASCII
const RUNNING = "Check that infer serve is running";
export const UNREACHABLE = `The server cannot be reached: it was stopped, or the network is down. ${RUNNING}.`;
const CUT_SHORT = `The answer was cut short: the server was stopped, or the network failed. ${RUNNING}, then run it again.`;
const KEYLESS = "The server needs the API key."; // short: the line beside the field never wraps
const WRONG_KEY = "The server refuses this key.";

let model = { key: null, answer: null }; // what /v1/models said to this key

/** Show an element with this text, or hide it if the text is empty. */
export function complain(id, text) {
  if (byId(id).textContent !== text) byId(id).textContent = text; // else a screen reader would say it again
  byId(id).hidden = !text;
}

function showKey(key, isRefused) {
  if (key !== givenKey()) return; // the response to an earlier key
  byId("key-row").hidden = !isRefused && !key;
  byId("key").setAttribute("aria-invalid", isRefused);
  complain("key-complaint", isRefused ? (key ? WRONG_KEY : KEYLESS) : "");
}

/** The response of the server; raises an Error with a sentence, and the status if there is one. */
export async function send(path, { headers = {}, ...options } = {}) {
  const key = givenKey();
  let response;
  try {
    const sent = { ...headers, ...(key && { Authorization: `Bearer ${key}` }) };
    response = await fetch(path, { ...options, headers: sent });
  } catch (error) {
    throw error.name === "AbortError" ? error : new Error(UNREACHABLE);
  }
  showKey(key, response.status === 401);
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  const said = body?.error?.message ?? `The server answered with status ${response.status} and no reason; see its log.`;
  throw Object.assign(new Error(said), { status: response.status });
}

/** Yields the data of each server-sent event of a response; raises an Error if the stream ends before its last event. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) throw new Error(CUT_SHORT);
      text += value;
      const blocks = text.split("\n\n");
      text = blocks.pop();
      for (const block of blocks) {
        const lines = block.split("\n");
        const data = lines.filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("");
        if (data === "[DONE]") return;
        if (!data) continue; // a comment
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Error(chunk.error.message);
        yield chunk;
        if (lines.includes("event: done")) return;
      }
    }
  } catch (error) {
    throw error instanceof TypeError ? new Error(CUT_SHORT) : error; // TypeError: the connection was lost
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** The model that is served, asked for once per key: {id, max_model_len}. */
export function servedModel() {
  const key = givenKey();
  if (model.key !== key) {
    const answer = send("v1/models").then((response) => response.json()).then(({ data }) => data[0]);
    model = { key, answer };
    answer.catch(forgetModel);
  }
  return model.answer;
}

/** Ask for the model again: the server may have been restarted with another. */
export function forgetModel() {
  model = { key: null, answer: null };
}
