// Conversations: messages of any role, calls of tools, images. All of it is text from elsewhere.

const LONG_TEXT = 1500; // characters above which a message is folded to its beginning
const IMAGE = /^image\/(png|jpeg|gif|webp|bmp|avif)$/;
const SOUND = /^audio\/[\w.+-]+$/;

const isRow = (answer) => answer.kind === "row";

/** What orders answers: their reward; of rows of a dataset, the mean log-prob of their trained tokens. */
const valueOf = (answer) => (isRow(answer) ? answer.logprob : answer.reward);

/** `answer 3`; of a pair `chosen` or `rejected`, of other rows `row 0`. */
function nameOf(answer) {
  if (!isRow(answer)) return `answer ${answer.index}`;
  return /\/(chosen|rejected)$/.exec(answer.sample_id ?? "")?.[1] ?? `row ${answer.index}`;
}

/** The text of a message, as chat formats write it: a string, or a list of parts. */
function textOf(message) {
  const content = message.content;
  if (typeof content === "string") return content;
  if (!Array.isArray(content)) return content ? JSON.stringify(content) : "";
  return content.map((part) => (typeof part === "string" ? part : part.text ?? `[${part.type ?? "part"}]`)).join("");
}

const CONTROL = /[\u0000-\u0008\u000b-\u001f\u007f]/g;
const DIRECTION = /[\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;

/** Characters that cannot be seen, or that would move others, as signs. */
function visible(text) {
  return text.replace(CONTROL, (sign) => (sign === "\u007f" ? "␡" : String.fromCharCode(0x2400 + sign.charCodeAt(0))))
    .replace(DIRECTION, (sign) => `‹U+${sign.charCodeAt(0).toString(16).toUpperCase()}›`);
}

/** The messages of the policy and its environment, without the prompt. */
function replyOf(answer) {
  const messages = answer.messages ?? [];
  const first = messages.findIndex((message) => message.role === "assistant");
  return first < 0 ? [] : messages.slice(first);
}

function promptOf(answer) {
  if (!answer.messages) return answer.prompt ? [{ role: "not trained", content: answer.prompt }] : [];
  const messages = answer.messages ?? [];
  return messages.slice(0, messages.length - replyOf(answer).length);
}

/** What the policy wrote, as one text; of a row of a dataset its trained tokens. */
function answerText(answer) {
  if (!answer.messages && answer.text) return answer.text;
  return replyOf(answer).map((message) => {
    const calls = (message.tool_calls ?? []).map((call) => `⚙ ${callText(call)}`);
    const role = message.role === "assistant" ? "" : `[${message.role}] `;
    return [role + textOf(message), ...calls].filter(Boolean).join("\n");
  }).join("\n");
}

function callText(call) {
  const { name, arguments: given } = call.function ?? call;
  return `${name ?? "?"}(${typeof given === "string" ? given : JSON.stringify(given ?? {})})`;
}

/** The last thing that was asked, on one line. */
function promptLine(answer) {
  const asked = promptOf(answer).findLast((message) => message.role === "user") ?? promptOf(answer).at(-1);
  return (asked ? textOf(asked) : answer.prompt ?? "").replace(/\s+/g, " ").trim();
}

/** Text, of which only the beginning is shown until the rest is asked for. */
function longText(text, limit = LONG_TEXT) {
  const element = h("div", { class: "text" });
  if (text.length <= limit * 1.2) return replace(element, text);
  const more = h("button", { class: "more", onclick: () => replace(element, text) }, `show all ${short(text.length)} characters`);
  return replace(element, text.slice(0, limit), "… ", more);
}

const isMedium = (part) => /image|audio/.test(part?.type ?? "");

/** The answer with the images and sounds of each message in it; `media` keeps those that no message has a part for. */
function withMedia(answer, media) {
  let next = 0;
  const messages = answer.messages?.map((message) => {
    const count = Array.isArray(message.content) ? message.content.filter(isMedium).length : 0;
    next += count;
    return count ? { ...message, media: media.slice(next - count, next) } : message;
  });
  return { ...answer, messages, media: media.slice(next) };
}

/** The media of an answer; one that another answer of the group has is taken from there. */
function resolvedMedia(answer, answers) {
  const held = (entry) => answers.find((each) => each.index === entry.answer)?.media?.[entry.number ?? 0];
  return (answer.media ?? []).map((entry, at) => (entry.answer === undefined ? entry : held({ number: at, ...entry }) ?? entry));
}

/** A message; those of tools and long prompts are folded. */
function messageView(message, open = true) {
  const text = textOf(message);
  const failed = message.role === "tool" && /^\s*error/i.test(text);
  const named = message.name ? ` ${message.name}` : "";
  const calls = (message.tool_calls ?? []).map((call) =>
    h("details", { class: "call" }, h("summary", {}, "calls ", h("code", {}, (call.function ?? call).name ?? "?")),
      h("pre", {}, callText(call))));
  const names = (message.tool_calls ?? []).map((call) => (call.function ?? call).name ?? "?").join(", ");
  const { role, content, tool_calls, name, media, ...others } = message;
  const rest = Object.keys(others).length ? h("details", { class: "call" },
    h("summary", {}, Object.keys(others).join(", ")), h("pre", {}, JSON.stringify(others, null, 2))) : null;
  return h("details", { class: `message ${/^\w+$/.test(role) ? role : ""}`, open },
    h("summary", {}, h("b", {}, role + named), 
      h("span", { class: "note" }, text || !calls.length ? ` ${plural(text.length, "character")}` : "", calls.length ? ` calls ${names}` : ""),
      failed && chip("✕ error", "bad")),
    text && longText(text), mediaView(media), calls, rest);
}

/** Images and sounds that are in the record; of others their address, which is not opened. */
function mediaView(media) {
  if (!media?.length) return null;
  return h("div", { class: "media" }, media.filter((each) => each.kind).map((each) => {
    const source = dataAddress(each);
    if (source && IMAGE.test(each.mime_type)) return h("img", { src: source, alt: `${each.kind}, ${each.mime_type}` });
    if (source && SOUND.test(each.mime_type)) return h("audio", { src: source, controls: true });
    const about = [each.data ?? "in another answer", each.error].filter(Boolean).join(": ");
    return h("p", { class: "note" }, `${[each.kind, each.mime_type && `(${each.mime_type})`].filter(Boolean).join(" ")}: ${about.slice(0, 300)}`);
  }));
}

function dataAddress({ mime_type: type, base64, data }) {
  if (base64) return `data:${type};base64,${base64}`;
  return typeof data === "string" && data.startsWith(`data:${type};base64,`) ? data : null;
}
