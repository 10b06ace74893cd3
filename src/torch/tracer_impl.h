// The state of one capture. Split over tracer.cpp (public calls), dispatch.cpp (one op arrives), functionalize.cpp (storages, views, writes).
#pragma once
#include <ATen/SavedTensorHooks.h>
#include <ATen/core/MT19937RNGEngine.h>

#include <deque>
#include <map>
#include <set>
#include <unordered_map>
#include <unordered_set>

#include "ir/node_map.h"
#include "torch/fake.h"
#include "torch/joint.h"
#include "torch/mode.h"
#include "torch/op_info.h"
#include "torch/seed_mark.h"
#include "torch/tracer.h"
#include "torch/view_order.h"

namespace vitrify {

namespace capture {
const void* hooks_on_saved();  // the ones that take what is saved now, or null
}

struct Tracer::Impl final : capture::ModeHandler {
  using View = capture::View;
  using StorageState = capture::StorageState;
  using OpInfo = capture::OpInfo;
  using Types = boost::container::small_vector<ir::TensorType, 1>;

  struct Source {
    at::Tensor real;
    at::Tensor fake;  // undefined until met
    ir::InputKind kind;
    std::string name;
    int32_t input = -1;
    int64_t real_version = -1;    // when the capture began, or went on; of what nobody has declared: when met
    int64_t bumps = 0;            // versions counted during the capture
    int64_t shared = 0;           // of these, those that another source with the same counter has, too, which tells calls of them
    torch::autograd::Edge edge;   // where its gradient goes, when it needs one
    compat::NodePtr accumulator;  // of a leaf that the program finds: the trace's own, while no capture runs
    bool frozen = false;          // or unfrozen, by the program
    bool exchanged = false;       // or also while one runs, when the tensor has it in place of `before`
    std::optional<decltype(torch::autograd::AutogradMeta::grad_accumulator_)> before;
    Source* grad_of = nullptr;       // it is the .grad of that one, found anew by every call
    std::optional<uint32_t> number;  // it is this step of `numbers`
  };

  // --- state
  TracerOptions options;
  Tracer* owner = nullptr;
  uint64_t trace = 0;
  bool started = false, done = false;
  bool accept_unknown = false;
  std::shared_ptr<ir::Graph> graph = std::make_shared<ir::Graph>();
  std::optional<std::string> failure;
  std::function<std::string()> source_callback;
  std::unordered_map<std::string, uint32_t> source_ids;
  uint32_t source = 0;
  capture::OpTable ops;
  std::deque<Source> sources;  // declared or met; stable addresses
  std::unordered_map<const c10::TensorImpl*, Source*> by_real;
  std::vector<Source*> inputs;  // graph input -> source
  uint32_t num_args = 0;
  bool is_argument(const Source& s) const { return s.input >= 0 && s.input < static_cast<int32_t>(num_args); }
  std::vector<std::shared_ptr<StorageState>> input_storages;          // one per distinct input tensor
  std::unordered_map<const StorageState*, ir::Value> writes_counted;  // how often custom ops have written to them, as each run counts it
  std::unordered_map<std::string, ir::Value> scalars;                 // scalar constants made so far
  std::shared_ptr<Numbers> numbers = std::make_shared<Numbers>();
  std::unordered_map<uint32_t, ir::Value> number_values;     // steps of `numbers` as operands: graph inputs, or what follows from
  std::vector<ir::Value> traced;                             // values read with item(), and
  std::unordered_map<uint32_t, ir::Value> traced_values;     // what was computed from them
  std::vector<std::pair<at::Tensor, at::Tensor>> new_grads;  // (placeholder or source, what its .grad has become)
  std::vector<std::pair<ir::Value, ir::Value>> masks;        // masks indexed with, and the positions they set
  std::unordered_set<uint32_t> found_symbols;                // ids of those that the run finds
  std::vector<sym::Int> guessed;                             // of those, whose hint is no more than a guess
  std::vector<ir::Node*> found_nodes;                        // whose results have them as sizes
  std::unordered_map<const ir::Node*, uint32_t> found_rows;  // see row_behind
  uint32_t row_behind(const std::vector<ir::Value>&);
  std::vector<std::pair<ir::Value, at::Tensor>> known_now;  // what some values are for the inputs of now
  std::unordered_map<uint32_t, int64_t> sizes_now() const;  // of found symbols that were taken for others: what they are
  bool took_other_sizes = false;                            // there were any
  void refuse_other_way() const;
  std::vector<InputFact> facts;  // of inputs, which the program has read
  void add_fact(int32_t input, Fact);
  size_t effects_known = 0;               // of TracerOptions::effects
  std::optional<std::string> raised_now;  // an op has, by what values are now, or what eager would not: a program that goes on has caught it
  std::optional<Types> described;         // results of the custom op under way, as its author describes them

  // --- process state put back at the end
  struct Saved {
    DType default_float = DType::F32;
    bool autocast_cache = true;
    uint64_t library = 0;  // library_state()
    int threads = 0;
    at::impl::SavedTensorDefaultHooksTLS saved_tensor_hooks;  // around the call: they are for what a call saves
    struct Generator {
      mutable at::Generator g;    // for its mutex
      at::Tensor before, during;  // states; during: what it is left in while the program runs
    };
    std::vector<Generator> generators;  // of the process; the CPU's comes first
    std::vector<Generator> others;      // that the program has drawn from
    at::mt19937 cpu_engine;             // the CPU generator's, as in `during`
    bool drew = false;                  // by the CPU's; its draws are taken back
    bool others_drew = false;           // between those: it is as they leave it
    std::vector<SeedMark> marks;        // of the CPU's, and then of declared ones
  };
  std::optional<Saved> saved;
  CaptureTurn turn;
  std::vector<at::Generator> declared_generators;
  void save_process_state();
  void restore_process_state();
  bool seed_set() const;
  bool generators_moved() const;
  void check_surroundings(const OpInfo&) const;
  void draw();
  void draw_from(const at::Generator&);
  void refuse_other_draws() const;
  ir::Value filled(ir::Node* empty);       // as deterministic mode has what nobody has written
  std::vector<at::Tensor> states() const;  // of the generators, as they are
  std::string state_key() const;
  // A checkpoint takes the generators back and draws the same numbers again: by the state before the draw. No other draw is from such a state.
  struct Drawn {
    ir::Node* node;
    at::mt19937 after;  // the CPU generator's
  };
  std::unordered_map<std::string, Drawn> draws;
  // A custom op may draw, which a capture does not see: it is taken to. Called again from the same state it runs in the state that it ran in.
  struct Called {
    ir::Value state;  // the CPU generator's, in the run
    at::mt19937 after;
  };
  std::unordered_map<std::string, Called> called;
  bool moved_on_from(const std::string& state) const { return draws.contains(state) || called.contains(state); }
  void drop_unread_states();
  void go_to(const at::mt19937&);
  void go_on(Saved::Generator&, const at::mt19937* to);  // null: by a draw
  std::vector<at::Tensor> last_forward_states;
  bool rewound = false;

  // --- inputs (tracer.cpp)
  at::Tensor make_input(Source&, const std::vector<DimMark>& dims);
  void require_grad(Source&);                                // joint.cpp
  const Source* found_itself(const at::Tensor& real) const;  // tape.cpp
  void check_in_scope(const at::Tensor&) const;
  at::Tensor fake_of(const at::Tensor& t);  // t itself, or the placeholder of a real tensor
  ir::Value value_of_tensor(const at::Tensor&);
  ir::Value scalar_value(const at::Tensor& real, bool wrapped);
  std::optional<c10::Scalar> symbolic_number(const at::Tensor&) const;
  at::Tensor constant(const at::Tensor& real);

  // --- numbers that change from call to call (live.cpp)
  at::Tensor number_tensor(const c10::IValue&);  // a number argument, live or not
  ir::Value number_value(uint32_t step);
  ir::Value traced_value(uint32_t step);
  std::optional<uint32_t> step_of_item(ir::Value);
  std::optional<uint32_t> step_of_value(ir::Value);
  std::optional<uint32_t> find_step(ir::Value);
  std::unordered_map<ir::Value, std::optional<uint32_t>> steps_of;  // while one is looked for
  bool has_live_number(const OpInfo&, const compat::Stack&) const;
  bool always_float(uint32_t step) const;
  void decompose_numbers(const OpInfo&, compat::Stack*);
  void decompose_list(const OpInfo&, compat::Stack*);

  // --- one op (dispatch.cpp)
  uint64_t view_calls = 0;  // of views with several results
  void dispatch(const c10::OperatorHandle&, compat::Stack*) override;
  c10::intrusive_ptr<c10::TensorImpl> detach(const c10::TensorImpl*) override;
  void run(const OpInfo&, compat::Stack*);
  [[noreturn]] void rethrow_as_eager(const OpInfo&, c10::ArrayRef<c10::IValue> args);
  void run_special(const OpInfo&, compat::Stack*);
  void run_pure(const OpInfo&, compat::Stack*);
  void run_view(const OpInfo&, compat::Stack*);
  void run_in_place_view(const OpInfo&, compat::Stack*);
  void run_write(const OpInfo&, compat::Stack*);
  void run_effect(const OpInfo&, compat::Stack*);
  at::Tensor out_on_zeros(const OpInfo&, const compat::Stack& fakes, size_t out);
  bool resize_out(const at::Tensor& out, ir::Value result, const at::Tensor& real);
  void run_on_copies(const OpInfo&, const compat::Stack& fakes, const std::vector<at::Tensor>& targets, compat::Stack*);
  void run_batch_norm(const OpInfo&, compat::Stack*);
  // --- what the run finds (found.cpp)
  std::optional<std::vector<at::Tensor>> values_now(const std::vector<ir::Value>&);
  std::vector<at::Tensor> find_sizes(const OpInfo&, const std::vector<ir::Arg>&, const Types&, size_t first_symbol);
  void settle_size(sym::Int symbol, int64_t size);
  void know_effect(const ir::Node&);
  ir::Node* found_before(const OpInfo&, const std::vector<ir::Arg>&) const;
  std::optional<bool> assume_equal(const at::Tensor&, const at::Tensor&);
  bool call_now(const OpInfo&, const std::vector<ir::Arg>&, compat::Stack* results);
  bool describe(const OpInfo&, const compat::Stack&);
  bool run_now(const OpInfo&, const std::vector<ir::Arg>&, compat::Stack* results);
  std::optional<c10::Scalar> constant_item(ir::Value) const;
  std::optional<c10::Scalar> assume(ir::Value);
  // A truth value that ATen's formula of the node under way asks for, and raises where it is false.
  struct Checks {
    std::vector<ir::Value> asked;
    std::optional<size_t> denied;  // the formula runs once more: what does it raise where this one is false?
    size_t next = 0;
  } checks;
  std::optional<bool> check(ir::Value);
  void raise_where_false(torch::autograd::Node&, const std::vector<at::Tensor>& grads);
  void check_found() const;
  ir::Value positions(ir::Value mask);
  at::Tensor index_by_mask(const at::Tensor& self, c10::ArrayRef<c10::IValue> indices);
  void run_index_by_mask(const OpInfo&, compat::Stack*);
  void decompose(const OpInfo&, compat::Stack*);

  // Results of a call as recorded: `results` is the boxed result with fakes' places still holding meta tensors (Meta path) or nothing (shape rule).
  struct Call {
    ir::Node* node = nullptr;
    Types types;          // flattened tensor results
    compat::Stack metas;  // filled by the Meta path
  };
  bool has_rule(const OpInfo&, c10::ArrayRef<c10::IValue>);  // that says what the op gives for these
  std::vector<ir::Arg> convert_args(const OpInfo&, c10::ArrayRef<c10::IValue>);
  // Symbols at their hints; with `specialize` the result may depend on those, so they are guarded.
  compat::Stack run_meta(const OpInfo&, c10::ArrayRef<c10::IValue>, c10::Device* result_device, bool specialize, bool real = false);
  bool same_sizes(const ir::Dims&, const ir::Dims&);  // guards
  Call record_call(const OpInfo&, c10::ArrayRef<c10::IValue> args);
  ir::Node* draw_in_bulk(const OpInfo&, const std::vector<ir::Arg>& args, const Types&);
  ir::Node* made_of_sizes(const OpInfo&, const std::vector<ir::Arg>& args, const Types&);
  ir::Node* append(const OpInfo&, std::vector<ir::Arg> args, Types outs);
  ir::Node* append(std::string_view name, std::vector<ir::Arg> args, Types outs);
  ir::Node* append_custom(const OpInfo&, std::vector<ir::Arg> args, Types outs);

  // --- storages and views (functionalize.cpp)
  std::shared_ptr<StorageState> new_storage(ir::Value base, ir::TensorType, int64_t offset, c10::Device);
  at::Tensor new_tensor(ir::Value, bool conj = false, bool neg = false);  // a fresh tensor holding that value
  ir::Value read(View&);
  ir::Value read_noted(View&);
  ir::Value read_as_was(View&);  // whatever a backward has found assigned
  ir::Value apply(View&, ir::Value parent);
  void write(View&, ir::Value, std::string_view op);
  ir::Value scatter(View& child, ir::Value parent, ir::Value value, std::string_view op);
  ir::Value conform(ir::Value, const ir::TensorType&, const std::function<ir::Value()>& old_value);
  ir::Value cast(ir::Value, const ir::TensorType&);
  ir::Value permute(ir::Value, const std::vector<sym::Int>& order);  // dispatch.cpp
  void check_inference(const std::vector<at::Tensor>& written, const OpInfo&) const;
  void check_write(const at::Tensor& written, c10::ArrayRef<c10::IValue> args, std::string_view op);
  std::vector<ResultSpec::ViewOp> path_of(const View&) const;

  // --- as_strided (strided.cpp)
  void assume_offset(uint32_t input);
  void assume_end(uint32_t input);
  void assume_place(const StorageState&);
  void note_memory(const OpInfo&, uint32_t result, const at::Tensor& fake, const at::Tensor& meta);  // of what a custom op gives
  void assume_of_input(std::string_view what, std::vector<ir::Arg> args, uint32_t flags = 0);
  struct Memory {
    View* of = nullptr;  // all of it, in this type and order of dims
    ir::TensorType type;
    std::vector<size_t> order;
    int64_t begin = 0, end = 0;  // elements that are looked at
  };
  std::optional<Memory> memory_of(const View& child);
  ir::Value elements_of(const Memory&, ir::Value);
  ir::Value from_elements(const Memory&, ir::Value);
  ir::Value read_strided(View& child);
  ir::Value write_strided(View& child, const Memory&, ir::Value);
  at::Tensor copy_strided(c10::ArrayRef<c10::IValue>);

  // --- end (results.cpp, joint.cpp)
  Program finish(const std::vector<at::Tensor>& outputs);
  bool makes_gradients(const std::vector<at::Tensor>& outputs);
  JointProgram finish_joint(const std::vector<at::Tensor>& outputs);
  // --- gradients (joint.cpp)
  // A node that raises when a backward comes to it, as eager's does: what is recorded goes round it.
  struct Raising {
    compat::NodePtr node;
    std::string says;
    int32_t input = -1;  // what it has saved is this graph input, written since: at this version, counted from the program's begin
    int64_t expected = 0;
    std::shared_ptr<StorageState> memory;  // or it is memory that the program has made
    std::vector<size_t> edges;             // those of its edges for which it raises; empty: for all
    std::function<void()> raise;           // raises it, above level 0
  };
  struct Level {
    std::vector<torch::autograd::Edge> from;  // of the roots
    std::vector<at::Tensor> tangents;
    std::vector<torch::autograd::Edge> to;           // where gradients leave
    std::vector<ir::Value> of;                       // whose they are
    std::vector<std::vector<capture::Chain>> views;  // per root: those of JointProgram::Root::views
    std::vector<torch::autograd::Edge> inner;        // by JointProgram::inner
    std::vector<at::Tensor> inner_tangents;
    std::vector<Raising> raising;                           // beside those of all levels
    std::unordered_map<const ir::Node*, at::Tensor> given;  // by input: the tangents that this level and those below were given
    const torch::autograd::Edge& at(size_t place) const { return place < from.size() ? from[place] : inner[place - from.size()]; }
    const at::Tensor& tangent(size_t place) const { return place < from.size() ? tangents[place] : inner_tangents[place - from.size()]; }
  };
  std::vector<Level> levels;
  struct OutputView {
    uint32_t result;
    capture::Chain chain;
  };
  std::unordered_map<uint32_t, std::vector<OutputView>> views_of_output;  // by graph output that is returned through views
  bool in_backward = false;
  bool in_trial = false;                           // in a backward that looks for what the program's own have freed
  bool in_batch = false;                           // in a backward of batched gradients
  Tracer::Look* look = nullptr;                    // in a backward whose formulas may look at values
  const torch::autograd::Node* summing = nullptr;  // in a backward: what this node has given is being added to what others gave
  bool gives_ordinary = false;                     // as Program's
  bool went_back = false;                          // the program has run a backward of its own
  bool freezes = false;                            // as Program's
  const torch::autograd::Node* const outer_node = torch::autograd::get_current_node().get();  // the call is made in a backward
  ir::Node* drawn_before(const std::string& state, const capture::OpInfo&, const std::vector<ir::Arg>&, const Types& outs);
  bool goes_back() const;                    // in one of the program's own, or of what is captured
  void again(const std::function<void()>&);  // goes on with a finished trace
  void placeholders_of(const JointProgram&, const Needs&, const std::function<void(const at::Tensor&, bool)>&) const;
  // Sequence numbers of nodes whose saved tensors the program's hooks took, as those of checkpoints do: nobody looks at versions of them. A
  // checkpoint has saved its arguments apart.
  std::unordered_set<uint64_t> hooked;
  // The op under way, and the last one that has written to an input, drawn, or may have done more than compute: the number of the node that autograd
  // has made for it, if it has, and the first node of the graph that is its own.
  struct Turn {
    uint64_t number = 0;
    uint32_t first = 0;
  };
  Turn turn_now;
  std::optional<Turn> last_write;
  struct SavedArguments {
    uint64_t from;  // the number of its first node
    std::vector<ir::Value> values;
    std::vector<std::shared_ptr<const StorageState>> memory;  // theirs: what is written through .data is given too, as it is by then
  };
  std::vector<SavedArguments> saved_arguments;
  std::vector<at::Tensor> may_be_found;  // results, by number: a checkpoint's function may read them again
  // In a derivative that is for one backward: what its functions meet for the first time, with constants in place of inputs.
  bool once = false;
  std::vector<std::pair<at::Tensor, at::Tensor>> met_late;  // with its placeholder
  std::vector<const ir::Node*> made_late;                   // not for other derivatives
  bool has_placeholder(const at::Tensor& real) const;
  at::Tensor late_constant(const at::Tensor& real);
  void forget_late();
  struct Cached {
    uintptr_t which;
    uint64_t from, to;  // numbers of its nodes
    bool once = false;  // a backward finds what was cached, and no other does
  };
  std::vector<Cached> cached;  // by selective checkpoints; the inner ones first
  const void* const outer_hooks = capture::hooks_on_saved();
  std::vector<Raising> raising;
  compat::NodePtr running;      // in a backward
  uint32_t backward_begin = 0;  // ids of the last one, from here on
  uint32_t round = 0;           // counts them
  // Whose memory it read, by memory_key(): of the tensors themselves, or by way of views that were there before.
  std::unordered_set<int32_t> read_itself, read_memory;
  std::map<int32_t, ir::Value> detached;  // what that stands for where it was detached before
  // Which nodes read it where writes to it are counted, and where they are not.
  std::set<std::pair<const torch::autograd::Node*, int32_t>> read_counted, read_uncounted;
  static constexpr int32_t kAllSaved = INT32_MIN;                             // in place of a key: all that the node has saved
  std::unordered_map<std::shared_ptr<StorageState>, uint32_t> result_memory;  // of results that are all of it: which graph outputs
  std::unordered_map<std::shared_ptr<StorageState>, int32_t>
      tangent_memory;                                                // of what derivatives that are differentiated again are given: which input
  std::unordered_map<std::shared_ptr<View>, uint32_t> result_views;  // of results that are views: which
  std::set<uint32_t> read_views;                                     // of those, what a backward has read
  std::map<const View*, ir::Value> assigned;                         // and, in a backward, other memory that some have by now
  void assign(const JointProgram&, const std::vector<uint32_t>& now, std::vector<std::pair<uint32_t, ir::Value>>& made);
  ir::Value read_as_assigned(View& v, const View& result);
  static const View* before_backwards(const View& v);  // what it is, or is a view of, that no backward has made
  // Of a graph input: its number. Of a result: result_key(). -1: of nobody else.
  int32_t memory_key(const std::shared_ptr<StorageState>&) const;
  static int32_t result_key(uint32_t output) { return -2 - static_cast<int32_t>(output); }
  static bool counts_writes(const View&, uint32_t round);  // versions of what autograd sees there are those of the memory
  bool raises(const torch::autograd::Node* n) const {
    return std::ranges::any_of(raising, [&](const Raising& r) { return r.node.get() == n; });
  }
  bool goes_round(const Level& level, const torch::autograd::Node* n) const {
    const auto is = [&](const Raising& r) { return r.node.get() == n && r.edges.empty(); };
    return raises(n) || std::ranges::any_of(level.raising, is);
  }
  // The same of what a backward of gradients raised, whatever that is. False: no node did.
  bool note_failing(Level&, const std::exception_ptr&);
  bool note_raising(std::string says);
  bool notes_raising(const std::exception&, uint32_t first);
  void find_past_raising(JointProgram&, const Level&) const;
  void find_parts(JointProgram&, Level&, const std::vector<at::Tensor>& outputs);  // parts.cpp
  void find_nodes(JointProgram&, const Level&) const;
  void find_below(JointProgram&, Level&, const JointProgram& below, const Level& of_below) const;
  class Round;
  class Stops;
  class Nodes;
  std::vector<std::pair<const torch::autograd::Node*, uint32_t>>
      ends;                                                        // of the last backward: its nodes as they ran, and the id after what each recorded
  std::unordered_map<const torch::autograd::Node*, size_t> ready;  // of it: when the last gradient was given to a node
  std::vector<std::shared_ptr<capture::StorageState>> given_now;   // the gradients of a user's own node that runs: it may not write to them
  std::map<const torch::autograd::Node*, std::set<uint32_t>> came;  // of it: ids of the values that came to a node as gradients
  std::unordered_set<const torch::autograd::Node*> held;  // of it: of gradients that eager's leaf would copy, since another node still has them too
  std::shared_ptr<const Tape> tape_of(const JointProgram&, const Level&) const;
  std::unordered_set<uint32_t> sums;  // ids of the nodes by which the engine adds gradients
  bool is_sum(const OpInfo&) const;
  bool sums_in_place(c10::ArrayRef<c10::IValue> args) const;
  void refuse_own_derivatives(const std::vector<at::Tensor>& outputs, const Program&) const;
  void order_views_of_inputs(const std::vector<at::Tensor>& outputs, const Level&, Program&);
  void add_root(JointProgram&, Level&, uint32_t output, const at::Tensor&);
  ir::Value add_tangent(const std::string& name, const ir::TensorType&, ir::InputKind kind = ir::InputKind::Tangent);
  std::vector<ir::Value> tangents_for(const JointProgram&, const std::vector<TangentLayout>&);
  // For Level::to, then what stops.
  std::vector<at::Tensor> run_backward(const Level&, const std::vector<at::Tensor>& tangents, bool create_graph,
                                       const std::vector<TangentLayout>& how = {});
  struct Grad {
    ir::Value of;
    ResultSpec how;
    ir::TensorType type;
    int32_t batch_dim = -1;
    int32_t place = -1;  // it stops there
  };
  // Gradients for the tangents that are defined; the values they are made of go to `values`.
  std::vector<Grad> differentiate(const Level&, const std::vector<at::Tensor>& tangents, std::vector<ir::Value>& values,
                                  const std::vector<TangentLayout>& how = {});
  void take_gradients(JointProgram&, std::vector<Grad>, const std::vector<ir::Value>& values);
  void place_inputs(JointProgram&);
  const at::Tensor& seen_by_autograd(const Source&) const;
  const at::Tensor& seen_by_autograd(const ir::Node& input, const Level&) const;  // also what its derivatives are given
  // accumulators.cpp
  void let_accumulators_go();
  void take_accumulators();
  std::vector<torch::autograd::Edge*> edges_to(const std::unordered_set<const torch::autograd::Node*>&);
  void redirect(const std::unordered_map<const torch::autograd::Node*, torch::autograd::Edge>&);
  torch::autograd::Edge edge_in_calls(const Source& s) const {  // where its gradient goes in a call
    return is_argument(s) ? torch::autograd::impl::gradient_edge(s.real) : s.edge;
  }
  // Tensors that have one memory, and to autograd none in common (_unsafe_view): what is in each is written as long as the other is not there.
  std::vector<std::pair<std::weak_ptr<StorageState>, std::weak_ptr<StorageState>>> torn_apart;
  void refuse_torn_apart(const StorageState&);
  void refuse_found_behind_another() const;
  void find_spent(std::vector<at::Tensor>& roots, Program&);
  bool is_outdated(const at::Tensor& view) const;
  // `roots`, if asked for: per graph output made, the tensor through which gradients come back.
  void emit_outputs(const std::vector<at::Tensor>& outputs, Program&, std::vector<at::Tensor>* roots = nullptr);
  void chain_views(const std::vector<at::Tensor>& results, std::vector<ResultSpec>&) const;
  void take_inputs(Program&);
  std::vector<at::Tensor> with_grads(const std::vector<at::Tensor>& outputs, Program&);
  void count_versions();
  void resume();
  ir::ValueMap<const StorageState*> output_roots;  // whose memory graph outputs are
  struct InputNode;
  ir::Value own_storage(ir::Value v, const StorageState* storage, ir::ValueMap<const StorageState*>& roots);
  void stop();
};

namespace capture {

[[noreturn]] void fail(std::string what);  // CaptureError
// A custom op that has no Meta kernel, or one that needs more than sizes: its description may say (Tracer::Impl::describe).
struct Undescribed : CaptureError {
  using CaptureError::CaptureError;
};
// Python hooks would run once, on placeholders. `to`: what is behind these is not of the program.
void refuse_hooks(const std::vector<torch::autograd::Edge>& roots, const std::vector<torch::autograd::Edge>& to);
std::shared_ptr<View> detached_view(const std::shared_ptr<View>& of);

}  // namespace capture
}  // namespace vitrify
