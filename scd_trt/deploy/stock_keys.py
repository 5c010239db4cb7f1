"""Keys of TensorRT-LLM's files that are known by name only: their values are TensorRT-LLM's business.

Union of 1.2 and of the main branch of the 1.4 line, by section; `stock_schema` names the sources and holds the keys whose
values matter to SCD. A key that is in neither is judged by `stock_files`.
"""

from __future__ import annotations


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


KV_CONNECTOR = _names(
    """
    mooncake_store server_url
    """
)
KV_CACHE = _names(
    """
    attention_dp_events_gather_period_ms avg_seq_len block_reuse_config cold_tier_offload_min_priority
    copy_on_partial_reuse cross_kv_cache_fraction disk_cache_path disk_io_threads disk_keep_copy_after_restore
    disk_prefetch_num_reqs disk_protected_copy_fraction disk_write_through enable_kv_pool_rebalance
    enable_swa_scratch_reuse event_buffer_max_size fp8_context_mla_kv_len_cap host_cache_bind_to_gpu_numa_node
    iteration_stats_interval kv_cache_event_hash_algo kv_events_config kv_pool_rebalance_check_interval
    kv_pool_rebalance_cooldown_secs kv_pool_rebalance_min_sampled_kv_caches
    kv_pool_rebalance_moving_average_decay kv_pool_rebalance_ratio_threshold
    kv_pool_rebalance_target_ratio_update_interval mamba_ssm_cache_dtype mamba_ssm_philox_rounds
    mamba_ssm_stochastic_rounding mamba_state_cache_interval mamba_state_config max_gpu_total_bytes
    max_util_for_resume mixed_precision_first_n onboard_blocks pool_ratio secondary_offload_min_priority use_uvm
    """
)
CACHE_TRANSCEIVER = _names(
    """
    enable_pipelined_transfer kv_cache_bounce_size_mb kv_transfer_poll_interval_ms
    kv_transfer_sender_future_timeout_ms kv_transfer_timeout_ms max_tokens_in_buffer transceiver_runtime
    """
)
SCHEDULER = _names(
    """
    context_chunking_policy dynamic_batch_config enable_prefix_aware_scheduling use_python_scheduler
    waiting_queue_policy
    """
)
CUDA_GRAPH = _names(
    """
    max_num_token max_seq_len mode num_tokens seq_lens
    """
)
TORCH_COMPILE = _names(
    """
    capture_num_tokens enable_fullgraph enable_inductor enable_userbuffers max_num_streams
    """
)
SERVER = _names(
    """
    allreduce_strategy attention_dp_config backend batch_wait_max_tokens_ratio batch_wait_timeout_iters
    batch_wait_timeout_ms batched_logits_processor checkpoint_format checkpoint_io_policy checkpoint_loader
    cp_config custom_tokenizer decoding_config disable_flashinfer_sampling disable_mm_encoder dwdp_config
    enable_autotuner enable_early_first_token_response enable_encoder_decoder_mixed_cuda_graph
    enable_energy_metrics enable_in_graph_sampling enable_iter_perf_stats enable_iter_req_stats
    enable_layerwise_nvtx_marker enable_lm_head_tp_in_adp enable_low_latency_host_dispatch enable_min_latency
    enable_mla_skip_correction enable_resource_governor enable_sleep enable_speculative_beam_history_d2h
    encode_only encoder_cuda_graph_config encoder_max_batch_size encoder_max_num_tokens env_overrides
    force_dynamic_quantization garbage_collection_gen0_threshold gather_generation_logits generation_config
    gms_config gpus_per_node guided_decoding_backend iter_stats_max_iterations layer_wise_benchmarks_config
    load_format max_input_len max_stats_len mla_skip_correction_threshold mm_encoder_only model model_kwargs
    moe_cluster_parallel_size moe_config moe_expert_parallel_size moe_tensor_parallel_size multimodal_config
    mx_config num_postprocess_workers num_serve_frontends nvfp4_gemm_config orchestrator_type
    otlp_traces_endpoint peft_cache_config perf_metrics_max_requests perf_metrics_output_dir post_processor_hook
    postprocess_tokenizer_dir pp_partition prefill_capture_num_tokens print_iter_log prometheus_metrics_config
    ray_placement_config ray_worker_extension_cls ray_worker_nsight_options reasoning_parser
    reorder_policy_config request_stats_max_iterations revision sampler_force_async_worker sampler_type
    skip_tokenizer_init sleep_config stream_interval telemetry_config tokenizer tokenizer_mode
    tokenizer_revision trust_remote_code use_cute_dsl_bf16_bmm use_cute_dsl_bf16_gemm
    use_cute_dsl_blockscaling_bmm use_cute_dsl_blockscaling_mm use_fine_grained_sync
    """
)
ROUTER = _names(
    """
    hash_algo health_check_interval max_batch_size max_num_tokens remote_url tokens_per_block use_tokens
    """
)
DISAGG = _names(
    """
    allow_request_chat_template disagg_coordinator_url gen_strip_message_history gen_tokids_ctxbytes num_workers
    """
)
