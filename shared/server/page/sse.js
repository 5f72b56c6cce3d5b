// Server-sent events of a fetch response. EventSource knows only GET, so the few lines of the format are read here.

/** Yields {event, data} for each frame of the response's body; comments are skipped. */
export async function* frames(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      text += value;
      const blocks = text.split("\n\n");
      text = blocks.pop();
      for (const block of blocks) {
        const frame = { event: null, data: "" };
        for (const line of block.split("\n")) {
          if (line.startsWith("event: ")) frame.event = line.slice(7);
          if (line.startsWith("data: ")) frame.data += line.slice(6);
        }
        if (frame.data) yield frame;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
