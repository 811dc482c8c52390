// HTTP client of the server's public routes.

class ApiError extends Error {
  constructor(message, { status = 0, code = "", param = "" } = {}) {
    super(message);
    Object.assign(this, { status, code, param });
  }
}

const KEY = "birkhoff-key",
  STEERING_KEY = "birkhoff-steering-key";
export const keys = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  getSteering: () => sessionStorage.getItem(STEERING_KEY) ?? "",
  set(key, steering) {
    sessionStorage.setItem(KEY, key);
    sessionStorage.setItem(STEERING_KEY, steering ?? "");
  },
};

function headers(body) {
  const out = {};
  if (body !== undefined) out["content-type"] = "application/json";
  if (keys.get()) out.authorization = `Bearer ${keys.get()}`;
  if (keys.getSteering()) out["x-steering-key"] = keys.getSteering();
  return out;
}

async function send(path, { method = "GET", body, signal } = {}) {
  if (document.body.classList.contains("frozen"))
    throw new ApiError("This is a saved file: it holds no server to ask.", { code: "frozen" });
  let response;
  try {
    response = await fetch(path, {
      method,
      signal,
      headers: headers(body),
      body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server is not responding. The page keeps retrying.", {
      code: "unreachable",
    });
  }
  if (response.ok) return response;
  let problem = {};
  try {
    problem = (await response.json()).error ?? {};
  } catch {
    /* not JSON, for example a proxy's error page */
  }
  throw new ApiError(problem.message ?? `The server returned status ${response.status}.`, {
    status: response.status,
    code: problem.code ?? "",
    param: problem.param ?? "",
  });
}

export async function call(path, options) {
  return (await send(path, options)).json();
}

export const post = (path, body, signal) => call(path, { method: "POST", body, signal });

/** Yields the parsed data of a server-sent event stream until [DONE]; throws on an error event. */
export async function* stream(path, body, signal) {
  const response = await send(path, { method: "POST", body, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done)
        throw new ApiError("The connection was lost before the response was complete.", {
          code: "cut_off",
        });
      buffer += value;
      let end;
      while ((end = buffer.search(/\r?\n\r?\n/)) >= 0) {
        const block = buffer.slice(0, end);
        buffer = buffer.slice(end).replace(/^\r?\n\r?\n/, "");
        for (const line of block.split(/\r?\n/)) {
          if (!line.startsWith("data:")) continue;
          const data = line.slice(5).trim();
          if (data === "[DONE]") return;
          const frame = JSON.parse(data);
          if (frame.error)
            throw new ApiError(frame.error.message, { code: frame.error.code ?? "", status: 500 });
          yield frame;
        }
      }
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof ApiError) throw error;
    throw new ApiError("The connection was lost before the response was complete.", { code: "cut_off" });
  } finally {
    reader.cancel().catch(() => {});
  }
}
