// What the page asks of the server: JSON, and figures that come in stages.

async function sent(path, body, signal) {
  const answer = await fetch(path, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body), signal });
  if (!answer.ok) throw new Error(await reason(answer));
  return answer;
}

async function reason(answer) {
  try {
    return (await answer.json()).error;
  } catch {
    return `the server answered ${answer.status}`;
  }
}

export async function get(path) {
  const answer = await fetch(path);
  if (!answer.ok) throw new Error(await reason(answer));
  return answer.json();
}

export const ask = async (path, body, signal) => (await sent(path, body, signal)).json();
export const askFile = async (path, body) => (await sent(path, body)).blob();

/** Calls `each` with every stage of the figures, as they come. */
export async function stages(words, signal, each) {
  const reader = (await sent("api/figures", { words }, signal)).body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      const stage = JSON.parse(line);
      if (stage.error) throw new Error(stage.error);
      each(stage);
    }
  }
}

/** The whole load's figures without the ends of the bands: what comparisons need. */
export async function whole(words) {
  const control = new AbortController();
  let found = null;
  try {
    await stages(words, control.signal, (stage) => {
      if (stage.stage !== "whole") return;
      found = stage;
      control.abort();
    });
  } catch (error) {
    if (!found) throw error;
  }
  return found;
}
