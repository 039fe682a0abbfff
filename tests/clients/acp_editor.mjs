// A client of the ACP TypeScript SDK. Arguments: the SDK's module, a working folder, the command.
// Does what a user would in an editor, and prints what came of it as one JSON object.
import { spawn } from "node:child_process";
import { readFileSync, writeFileSync } from "node:fs";
import { Readable, Writable } from "node:stream";

const [where, cwd, ...command] = process.argv.slice(2);
const acp = await import(where);
const { agent, client } = acp.methods;
const found = {};

function start() {
  const child = spawn(command[0], command.slice(1), { stdio: ["pipe", "pipe", "inherit"] });
  const ended = new Promise((resolve) => child.on("exit", (code) => resolve(code)));
  const state = { text: "", thoughts: "", calls: [], permit: "allow_once", onText: () => {} };
  const app = acp
    .client({ name: "test" })
    .onNotification(client.session.update, ({ params: { update } }) => {
      if (update.sessionUpdate === "agent_message_chunk") {
        state.text += update.content.text;
        state.onText();
      }
      if (update.sessionUpdate === "agent_thought_chunk") state.thoughts += update.content.text;
      if (update.sessionUpdate === "tool_call_update") state.calls.push(update.status);
    })
    .onRequest(client.session.requestPermission, ({ params }) => {
      const option = params.options.find((one) => one.kind === state.permit);
      return { outcome: { outcome: "selected", optionId: option.optionId } };
    })
    .onRequest(client.fs.readTextFile, ({ params }) => ({
      content: readFileSync(params.path, "utf8"),
    }))
    .onRequest(client.fs.writeTextFile, ({ params }) => {
      writeFileSync(params.path, params.content);
      return {};
    });
  const stream = acp.ndJsonStream(Writable.toWeb(child.stdin), Readable.toWeb(child.stdout));
  const to = app.connect(stream).agent;
  const take = (kind) => {
    const value = state[kind];
    state[kind] = kind === "calls" ? [] : "";
    return value;
  };
  return { child, ended, state, to, take };
}

async function open(to) {
  const clientCapabilities = { fs: { readTextFile: true, writeTextFile: true } };
  await to.request(agent.initialize, { protocolVersion: acp.PROTOCOL_VERSION, clientCapabilities });
  return (await to.request(agent.session.new, { cwd, mcpServers: [] })).sessionId;
}

const words = (text) => [{ type: "text", text }];
const code = (promise) => promise.then(() => 0, (error) => error.code);

const { child, ended, state, to, take } = start();
const sessionId = await open(to);
const prompt = (text, options) =>
  to.request(agent.session.prompt, { sessionId, prompt: words(text) }, options);
const begun = () => new Promise((resolve) => (state.onText = resolve));
const think = (value) =>
  to.request(agent.session.setConfigOption, { sessionId, configId: "thought_level", value });

found.exec = [(await prompt("hello")).stopReason, take("text")];
child.stdin.write('[{"jsonrpc": "2.0", "id": 1, "method": "initialize"}]\n');
found.second = [(await prompt("again")).stopReason, take("text")];

found.wrong = [
  await code(to.request(agent.session.load, { sessionId, cwd, mcpServers: [] })),
  await code(to.request(agent.session.setMode, { sessionId, modeId: "plan" })),
  await code(to.request("_some/extension", {})),
  await code(to.request(agent.session.prompt, { sessionId: "none", prompt: words("x") })),
];

await prompt("edit please");
found.approved = [take("calls").at(-1), readFileSync(`${cwd}/a.txt`, "utf8")];
state.permit = "reject_once";
await prompt("edit again");
found.denied = [take("calls").at(-1), readFileSync(`${cwd}/a.txt`, "utf8")];
take("text");

let running = prompt("on and on");
await begun();
found.busy = await code(prompt("hello"));
await to.notify(agent.session.cancel, { sessionId });
found.cancelled = (await running).stopReason;
const aborting = new AbortController();
running = prompt("on and on", { cancellationSignal: aborting.signal, signal: aborting.signal });
await begun();
aborting.abort();
found.aborted = await running.then((one) => one.stopReason, (error) => error.code ?? error.name);
take("text");

found.options = (await think("on")).configOptions.map((one) => one.currentValue);
await prompt("think about it");
found.thoughts = [take("thoughts"), take("text")];
found.options.push(...(await think("off")).configOptions.map((one) => one.currentValue));
found.closed = [await code(to.request(agent.session.close, { sessionId })), await code(prompt("x"))];
child.stdin.end();
found.end = await ended;

const other = start();
const session = await open(other.to);
other.to.request(agent.session.prompt, { sessionId: session, prompt: words("on and on") }).catch(() => {});
await new Promise((resolve) => (other.state.onText = resolve));
other.child.kill("SIGINT");
found.interrupted = await other.ended;

console.log(JSON.stringify(found));
process.exit(0);
